from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8core.store.lines import append_durably, lines_backward, lines_forward, whole_end

LENGTHS = st.lists(st.sampled_from([0, 1, 17, 65_534, 65_535, 65_536, 65_537, 140_000]), max_size=6)


def located(content: bytes) -> list[tuple[int, bytes]]:
    """What newlines separate, with offsets."""
    pieces = content.split(b"\n")
    return [(sum(len(piece) + 1 for piece in pieces[:i]), piece) for i, piece in enumerate(pieces)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from([0, 3, 65_536, 70_000]))
def test_both_directions_give_the_lines_wherever_blocks_end(tmp_path: Path, lengths: list[int], torn: int) -> None:
    content = b"".join(b"%c" % (97 + i) * length + b"\n" for i, length in enumerate(lengths)) + b"t" * torn
    (tmp_path / "f").write_bytes(content)
    expected = located(content)
    with FileIO(tmp_path / "f") as file:
        assert list(lines_backward(file, len(content))) == expected[::-1]
        assert list(lines_forward(file, 0, len(content))) == expected[:-1]
        assert whole_end(file) == len(content) - torn
        for begin, _ in expected:
            assert list(lines_forward(file, begin, len(content))) == [
                line for line in expected[:-1] if line[0] >= begin
            ]


def test_only_as_much_is_read_as_is_asked(tmp_path: Path) -> None:
    hole = 1 << 40
    with (tmp_path / "f").open("wb") as sparse:
        sparse.write(b"first\n")
        sparse.seek(hole)
        sparse.write(b"\nlast\n")
    with FileIO(tmp_path / "f") as file:
        assert next(lines_forward(file, 0, hole + 6)) == (0, b"first")
        assert list(islice(lines_backward(file, hole + 6), 2)) == [(hole + 6, b""), (hole + 1, b"last")]


def test_zeros_in_the_last_line_make_it_torn(tmp_path: Path) -> None:
    for tail in (b"\0" * 100_000, b'{"a' + b"\0" * 40 + b"\n"):
        (tmp_path / "f").write_bytes(b"whole\n" + tail)
        with FileIO(tmp_path / "f") as file:
            assert whole_end(file) == 6


def test_an_append_that_fails_half_way_adds_nothing(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with FileIO(tmp_path / "f", "a") as file:
        append_durably(file, b"one\n")
        with file_size_limit(6), pytest.raises(OSError, match="File too large"):
            append_durably(file, b"two\nthree\n")
        append_durably(file, b"four\n")
    assert (tmp_path / "f").read_bytes() == b"one\nfour\n"
