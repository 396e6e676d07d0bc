import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.advantages import (
    group_advantages,
    leave_one_out_advantages,
    mean_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)

EPSILON = 1e-4


def slow_group(rewards, own, others):
    return (own - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)


def slow_population(rewards, own, others):
    return (own - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + EPSILON)


def slow_mean(rewards, own, others):
    return own - statistics.fmean(rewards)


def slow_rloo(rewards, own, others):
    return own - statistics.fmean(others)


def slow_leave_one_out(rewards, own, others):
    std = statistics.stdev(others) if len(others) > 1 else 0.0
    return (own - statistics.fmean(others)) / (std + EPSILON if std else 1.0)


def slow(formula, rewards, groups, keep):
    """Independent: one row at a time, Python's statistics module."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [j for j, other in enumerate(groups) if other == group and keep[j]]
        alone = not keep[i] or len(mates) < 2
        values, others = [rewards[j] for j in mates], [rewards[j] for j in mates if j != i]
        result.append(0.0 if alone else formula(values, reward, others))
    return result


def slow_plus_plus_baseline(rewards, groups, keep):
    return slow(slow_population, slow(slow_mean, rewards, groups, keep), [0] * len(rewards), keep)


ESTIMATORS = {
    "grpo": (lambda r, g, keep: group_advantages(r, g, EPSILON, keep=keep), slow_group),
    "grpo population": (lambda r, g, keep: group_advantages(r, g, EPSILON, keep=keep, ddof=0), slow_population),
    "dr grpo": (lambda r, g, keep: mean_advantages(r, g, keep=keep), slow_mean),
    "rloo": (lambda r, g, keep: rloo_advantages(r, g, keep=keep), slow_rloo),
    "leave one out": (lambda r, g, keep: leave_one_out_advantages(r, g, EPSILON, keep=keep), slow_leave_one_out),
}
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, 100.0])
ROWS = st.lists(st.tuples(REWARDS, st.integers(-2, 3), st.booleans()), min_size=1, max_size=24)


def tensors(rows):
    rewards, groups, keep = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(keep)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=60)
@given(rows=ROWS)
def test_each_estimator_equals_an_independent_loop(name, rows):
    estimator, formula = ESTIMATORS[name]
    rewards, groups, keep = tensors(rows)
    for mask in (keep, None):
        kept = [True] * len(rows) if mask is None else keep.tolist()
        expected = slow(formula, rewards.tolist(), groups.tolist(), kept)
        assert estimator(rewards, groups, mask).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60)
@given(rows=ROWS)
def test_reinforce_plus_plus_equals_an_independent_loop(rows):
    rewards, groups, keep = tensors(rows)
    r, g, k = rewards.tolist(), groups.tolist(), keep.tolist()
    assert reinforce_plus_plus_advantages(rewards, EPSILON, keep=keep).tolist() == pytest.approx(
        slow(slow_population, r, [0] * len(r), k), abs=1e-9
    )
    assert reinforce_plus_plus_baseline_advantages(rewards, groups, EPSILON, keep=keep).tolist() == pytest.approx(
        slow_plus_plus_baseline(r, g, k), abs=1e-7
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=30)
@given(rows=ROWS, random=st.randoms())
def test_row_order_and_group_labels_do_not_matter(name, rows, random):
    estimator, _ = ESTIMATORS[name]
    rewards, groups, keep = tensors(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = estimator(rewards[order], groups[order] * 7 - 3, keep[order])
    assert shuffled.tolist() == pytest.approx(estimator(rewards, groups, keep)[order].tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=30)
@given(reward=st.floats(-1e3, 1e3), count=st.integers(1, 9))
def test_equal_rewards_and_lone_rows_give_exactly_zero(name, reward, count):
    estimator, _ = ESTIMATORS[name]
    rewards = torch.tensor([reward] * count + [5.0], dtype=torch.float64)
    groups = torch.tensor([4] * count + [8])
    assert estimator(rewards, groups, None).count_nonzero() == 0


def test_zero_epsilon_divides_nothing_by_zero():
    rewards, groups, keep = torch.tensor([1.0, 1.0, 3.0]), torch.tensor([0, 0, 1]), torch.tensor([True, True, False])
    assert group_advantages(rewards, groups, 0.0, keep=keep).tolist() == [0.0, 0.0, 0.0]
    assert leave_one_out_advantages(rewards, groups, 0.0).tolist() == [0.0, 0.0, 0.0]
    assert reinforce_plus_plus_advantages(rewards, 0.0, keep=keep).tolist() == [0.0, 0.0, 0.0]


def test_golden_group():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int32), 0.0)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    population = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4), 0.0, ddof=0)
    assert population[0].item() == pytest.approx(math.sqrt(3))


def test_baseline_leak_of_a_rejected_sibling():
    """Rewards 100 (rejected) and 1: over all rows the kept one gets -49.5; over kept rows it has no baseline."""
    rewards, groups, keep = torch.tensor([100.0, 1.0]), torch.tensor([0, 0]), torch.tensor([False, True])
    assert mean_advantages(rewards, groups).tolist() == [49.5, -49.5]
    assert mean_advantages(rewards, groups, keep=keep).tolist() == [0.0, 0.0]
    three = mean_advantages(torch.tensor([100.0, 1.0, 0.0]), torch.zeros(3), keep=torch.tensor([False, True, True]))
    assert three.tolist() == [0.0, 0.5, -0.5]


def test_a_rejected_nan_reward_does_not_leak():
    rewards, groups = torch.tensor([math.nan, 1.0, 0.0]), torch.zeros(3)
    keep = torch.tensor([False, True, True])
    for estimator, _ in ESTIMATORS.values():
        result = estimator(rewards, groups, keep)
        assert result[0] == 0
        assert result.isfinite().all()


def test_dtype_follows_the_rewards_and_inputs_stay_untouched():
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([5, 5])
    assert group_advantages(rewards, groups, EPSILON).dtype == torch.float32
    assert group_advantages(rewards.double(), groups, EPSILON).dtype == torch.float64
    assert (rewards.tolist(), groups.tolist()) == ([1.0, 0.0], [5, 5])
