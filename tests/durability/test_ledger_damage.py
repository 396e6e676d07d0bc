"""A ledger whose last line is torn, and one that was written under a clock that has gone back since."""

import time

import pytest

from fp8core.store.ledger import Ledger, StepEntry
from fp8core.store.run_directory import LEDGER

DAY_MS = 86_400_000


def lines_before_the_last(content):
    *before, _ = content.splitlines(keepends=True)
    return b"".join(before)


def test_a_last_line_torn_at_any_byte_is_cut_off(cut, tmp_path):
    content = (cut("2 step").folder / LEDGER).read_bytes()
    before, torn = lines_before_the_last(content), tmp_path / LEDGER
    for length in range(len(before), len(content)):
        torn.write_bytes(content[:length])
        Ledger.open(torn).close()
        assert torn.read_bytes() == before


@pytest.mark.parametrize("line", ["segment", "3 train", "2 step", "4 checkpoint"])
def test_a_run_with_a_torn_last_line_goes_on(cut, whole, line):
    training = cut(line)
    ledger = training.folder / LEDGER
    content = ledger.read_bytes()
    ledger.write_bytes(content[: (len(lines_before_the_last(content)) + len(content)) // 2])
    training.live()
    training.must_equal(whole)
    training.must_have_committed_once(whole)


def test_a_clock_that_goes_back_between_two_lives(cut, whole):
    training = cut("3 step")
    path = training.folder / LEDGER
    ahead = int(time.time() * 1000) + DAY_MS
    lines = path.read_text().splitlines()
    last = StepEntry.model_validate_json(lines[-1]).model_copy(update={"committed_ms": ahead})
    path.write_text("\n".join([*lines[:-1], last.model_dump_json()]) + "\n")
    training.live()
    training.must_equal(whole)
    training.must_have_committed_once(whole)
    steps = training.ledger.steps()
    assert ahead < steps[4].committed_ms < steps[5].committed_ms < ahead + DAY_MS
    timings = [seconds for manifest in training.manifests() for seconds in manifest.observed.timings.values()]
    assert min(timings) >= 0
    assert max(timings) < 60
