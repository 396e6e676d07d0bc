"""Lines of progress: of parts that take long, and of no others."""

import re
import time

from fp8core.progress import Part, progress_round, tell_progress


def eventually(lines: list[str], pattern: str) -> None:
    """Wait until the last line is as `pattern` says."""
    deadline = time.monotonic() + 20
    while not (lines and re.fullmatch(pattern, lines[-1])):
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_a_part_says_what_it_is_how_far_it_is_and_what_is_left() -> None:
    lines = list[str]()
    with Part("held-out", lines.append, first=0.01):
        eventually(lines, r"held-out: 0:00 so far")
        tell_progress(0, 12_000)
        eventually(lines, r"held-out: 0/12,000 after 0:0\d")
        tell_progress(3_000, 12_000)
        eventually(lines, r"held-out: 3,000/12,000 after 0:0\d, 0:\d\d left")
        with progress_round(1, 4):
            tell_progress(3_000, 12_000)
        eventually(lines, r"held-out: 15,000/48,000 after .*")
    said = [*lines]
    time.sleep(0.05)
    assert lines == said, "nothing comes after its end"


def test_the_inner_part_speaks_in_place_of_the_outer_one() -> None:
    lines = list[str]()
    with Part("step", lines.append, first=0.01) as outer:
        with Part("scores", lines.append, first=0.01):
            tell_progress(1, 2)
            eventually(lines, r"scores: 1/2 .*")
            begun = len(lines)
            time.sleep(0.1)
            assert all(line.startswith("scores") for line in lines[begun:])
        outer(3, 4)
        eventually(lines, r"step: 3/4 .*")
