import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8core.report.run_data import overhead_ms, summarise, union_seconds

ticks = st.integers(0, 60)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8)


def covered_ticks(spans: list[tuple[float, float]], start: float = 0.0, end: float = 60.0) -> int:
    return sum(any(a <= tick and tick + 1 <= b for a, b in spans) for tick in range(int(start), int(end)))


@given(intervals, ticks, ticks)
def test_a_union_is_the_count_of_covered_ticks_and_overhead_the_uncovered_ones(spans, a: int, b: int) -> None:
    assert union_seconds(spans) == union_seconds(reversed(spans)) == covered_ticks(spans)
    start, end = float(min(a, b)), float(max(a, b))
    assert overhead_ms((start, end), spans) == 1000 * (end - start - covered_ticks(spans, start, end))


def test_a_summary_is_of_all_steps() -> None:
    history = [{"step": 0, "reward/heldout_accuracy": 0.4}]
    for step in range(1, 31):
        history.append({"step": step, "reward/mean": step / 30, "reward/groups_with_signal": float(step > 2)})
    history[7] |= {"alignment/token_mult_prob_error": 1.0 + 1 / 128, "alignment/tokens_differing": 3.0}
    history[20]["reward/heldout_accuracy"] = 0.9
    summary = summarise(history, [500.0, 250.0, 0.0])
    assert summary["steps"] == 30
    assert summary["reward_first10"] == pytest.approx(5.5 / 30)
    assert summary["reward_last10"] == pytest.approx(25.5 / 30)
    assert (summary["heldout_first"], summary["heldout_last"]) == (0.4, 0.9)
    assert (summary["tmpe_max"], summary["tokens_differing"]) == (1.0 + 1 / 128, 3)
    assert summary["steps_without_signal"] == 2
    assert summary["overhead_ms_per_step"] == {"median": 250.0, "mean": 250.0}
