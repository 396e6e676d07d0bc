import fnmatch
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.alignment_metrics import METRICS, alignment_metrics, k3


def batch(seed, rows=6, tokens=40, spread=0.3):
    """Of the written tokens of a row, those in its middle may be a tool's."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, tokens, generator=generator)
    training = rollout + spread * torch.randn(rows, tokens, generator=generator)
    ends, columns = torch.randint(1, tokens + 1, (rows, 1), generator=generator), torch.arange(tokens)
    tool = (columns >= ends // 3) & (columns < ends // 2) & (ends % 2 == 0)
    return training, rollout, (columns < ends) & ~tool


def slow_metrics(training, rollout, mask, cap=2.0):
    """Independent: Python floats, one loop over rows and tokens, formulas as in the references."""
    rows = []
    for t_row, g_row, m_row in zip(training.tolist(), rollout.tolist(), mask.tolist(), strict=True):
        row = [p - g for p, g, m in zip(t_row, g_row, m_row, strict=True) if m]
        if row:
            rows.append(row)
    d = [x for row in rows for x in row]
    w = [math.exp(x) for x in d]
    v = [min(x, cap) for x in w]
    return {
        "tokens": len(d),
        "tokens_differing": sum(x != 0 for x in d),
        "token_mult_prob_error": mean(math.exp(abs(x)) for x in d),
        "kl": mean(-x for x in d),
        "k3_kl": mean(math.exp(x) - x - 1 for x in d),
        "sampling_importance_ratio": mean(w),
        "ess": 1 / mean((x / mean(v)) ** 2 for x in v),
        "logprob_abs_diff": mean(map(abs, d)),
        "logprob_abs_diff_max": max(map(abs, d)),
        "abs_diff_p99": sorted(map(abs, d))[math.ceil(0.99 * len(d)) - 1],
        "max_seq_mult_prob_error": max(mean(math.exp(abs(x)) for x in row) for row in rows),
        **slow_positions(rows),
    }


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def slow_positions(rows):
    ranges = (("0_15", 0, 16), ("16_63", 16, 64), ("64_255", 64, 256), ("256_1023", 256, 1024), ("1024_up", 1024, None))
    found = {}
    for name, start, stop in ranges:
        bucket = [x for row in rows for x in row[start:stop]]
        if bucket:
            found[f"token_mult_prob_error_pos_{name}"] = mean(math.exp(abs(x)) for x in bucket)
    return found


@pytest.mark.parametrize(("seed", "tokens", "spread"), [(0, 40, 0.3), (1, 300, 0.01), (2, 5, 2.0), (3, 1500, 0.1)])
def test_every_metric_equals_an_independent_loop(seed, tokens, spread):
    training, rollout, mask = batch(seed, tokens=tokens, spread=spread)
    assert alignment_metrics(training, rollout, mask) == pytest.approx(
        slow_metrics(training, rollout, mask), rel=1e-9, abs=1e-12
    )


def test_exact_agreement_gives_the_ideal_that_each_metric_declares():
    _, logprobs, mask = batch(0, tokens=300)
    result = alignment_metrics(logprobs, logprobs.clone(), mask)
    declared = {metric.name.removeprefix("alignment/"): metric.ideal for metric in METRICS}
    names = {pattern: fnmatch.filter(result, pattern) for pattern in declared}
    assert {name for found in names.values() for name in found} == {*result}
    for pattern, ideal in declared.items():
        assert names[pattern], pattern
        assert ideal is None or {result[name] for name in names[pattern]} == {ideal}, pattern


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 30), st.randoms())
def test_padding_and_row_order_do_not_change_a_bit(seed, padding, random):
    training, rollout, mask = batch(seed)
    rows = list(range(len(mask)))
    random.shuffle(rows)
    left, right = (torch.full((len(rows), n), torch.nan) for n in (padding, padding // 2))
    moved = alignment_metrics(
        torch.cat([left, training[rows], right], 1),
        torch.cat([left, rollout[rows], right], 1),
        torch.cat([left > 0, mask[rows], right > 0], 1),
    )
    assert moved == alignment_metrics(training, rollout, mask)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_junk_and_empty_rows_do_not_leak(junk):
    training, rollout, mask = batch(4)
    mask[2] = False
    whole = alignment_metrics(training, rollout, mask)
    rows = [0, 1, 3, 4, 5]
    assert whole == alignment_metrics(training[rows], rollout[rows], mask[rows])
    dirty = alignment_metrics(training.where(mask, junk), rollout.where(mask, -junk), mask)
    assert dirty == whole
    assert all(math.isfinite(value) for value in dirty.values())


def test_huge_differences_stay_finite():
    rollout = torch.tensor([[-1.0, -2.0, -800.0], [-800.0, -900.0, -1000.0]])
    training = torch.tensor([[-900.0, -1e30, -0.5], [-1.0, -1.0, -1.0]])
    result = alignment_metrics(training, rollout, torch.ones(2, 3, dtype=torch.bool))
    assert all(math.isfinite(value) for value in result.values())
    assert result["token_mult_prob_error"] == pytest.approx(math.exp(20))


def test_bit_equality_counts_the_sign_of_zero():
    training, rollout = torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.0, -1.0]])
    assert alignment_metrics(training, rollout, torch.ones(1, 2, dtype=torch.bool))["tokens_differing"] == 1


@pytest.mark.parametrize(("side", "value"), [("training", math.nan), ("rollout", math.inf)])
def test_unmasked_junk_is_refused_with_its_place(side, value):
    training, rollout, mask = batch(8)
    mask[3, :8] = True
    {"training": training, "rollout": rollout}[side][3, 7] = value
    with pytest.raises(ValueError, match=rf"{side} log-prob at row 3, position 7 is {value}"):
        alignment_metrics(training, rollout, mask)


def test_k3_keeps_the_digits_of_small_differences():
    d = torch.tensor([1e-6], dtype=torch.float64)
    assert k3(d).item() == pytest.approx(0.5e-12, rel=1e-6)
