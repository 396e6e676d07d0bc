import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.advantages import ESTIMATORS as CONFIGURED
from fp8core.rl.advantages import (
    OVER_TOKENS,
    Scores,
    TurnReward,
    group_advantages,
    informative,
    kl_penalties,
    leave_one_out_advantages,
    mean_advantages,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
    turn_advantages,
)

EPSILON = 1e-4


def slow_group(rewards, own, others):
    return (own - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)


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


ESTIMATORS = {
    "grpo": (lambda r, g, keep: group_advantages(r, g, EPSILON, keep=keep), slow_group),
    "dr grpo": (lambda r, g, keep: mean_advantages(r, g, keep=keep), slow_mean),
    "rloo": (lambda r, g, keep: rloo_advantages(r, g, keep=keep), slow_rloo),
    "leave one out": (lambda r, g, keep: leave_one_out_advantages(r, g, EPSILON, keep=keep), slow_leave_one_out),
}
BY_NAME = {
    "grpo": slow_group,
    "dr_grpo": slow_mean,
    "rloo": slow_rloo,
    "leave_one_out": slow_leave_one_out,
    "reinforce_plus_plus": None,
    "reinforce_plus_plus_baseline": None,
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


EPISODES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.booleans(),
        REWARDS,
        st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("name", [name for name, formula in BY_NAME.items() if formula])
@settings(max_examples=40)
@given(episodes=EPISODES)
def test_a_turn_is_compared_with_those_of_its_number(name, episodes):
    """By what follows it; two tokens of observation after each turn get nothing, nor does the first answer count."""
    groups, keep, first, turns = zip(*episodes, strict=True)
    spans, ends = [], []
    for row, of_row in enumerate(turns):
        begin = 0
        spans.append(TurnReward(row, 0, 0, 0, first[row]))
        for number, (reward, length) in enumerate(of_row, start=1):
            spans.append(TurnReward(row, number, begin, begin + length, reward))
            begin += length + 2
        ends.append(begin)
    mask = torch.zeros(len(episodes), max(ends), dtype=torch.bool)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for span in filter(lambda span: span.turn, spans):
        mask[span.row, span.begin : span.end] = True
        mates = [i for i, of_row in enumerate(turns) if groups[i] == groups[span.row] and len(of_row) >= span.turn]
        following = [math.fsum(reward for reward, _ in turns[i][span.turn - 1 :]) for i in mates]
        advantages = slow(BY_NAME[name], following, [0] * len(mates), [keep[i] for i in mates])
        expected[span.row, span.begin : span.end] = advantages[mates.index(span.row)]
    whole = [math.fsum([first[row], *(reward for reward, _ in of_row)]) for row, of_row in enumerate(turns)]
    rewards = torch.tensor(whole, dtype=torch.float64)
    scores = Scores(rewards=rewards, groups=torch.tensor(groups), keep=torch.tensor(keep), mask=mask)
    found = turn_advantages(scores, spans, CONFIGURED[name], EPSILON)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def whitened(values, unbiased, epsilon=0.0):
    """(value - mean) / std of tokens [(value, counts)] over those that count: with the sample variance as verl and
    SkyRL (`masked_whiten`), with the population's as NeMo RL and OpenRLHF."""
    counted = [v for v, counts in values if counts]
    if len(counted) < 2:
        return [0.0] * len(values)
    mean = math.fsum(counted) / len(counted)
    variance = math.fsum((v - mean) ** 2 for v in counted) / (len(counted) - unbiased)
    return [(v - mean) / (math.sqrt(variance) + epsilon) if counts else 0.0 for v, counts in values]


def token_rows(rewards, lengths):
    return [(reward, True) for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]


def first_of_rows(tokens, lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [tokens[start] if length else 0.0 for start, length in zip(starts, lengths, strict=True)]


def mask_of(lengths):
    return torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]


LENGTHS = st.lists(st.tuples(REWARDS, st.integers(-2, 3), st.booleans(), st.integers(0, 9)), min_size=2, max_size=16)


@settings(max_examples=80)
@given(rows=LENGTHS)
def test_reinforce_plus_plus_is_normalised_over_tokens(rows):
    """verl/trainer/ppo/core_algos.py, `compute_reinforce_plus_plus[_baseline]_outcome_advantage`."""
    rewards, groups, keep = tensors([row[:3] for row in rows])
    r, g, k, n = (list(values) for values in zip(*rows, strict=True))
    plain = first_of_rows(whitened(token_rows(r, n), unbiased=1, epsilon=EPSILON), n)
    assert reinforce_plus_plus_advantages(rewards, mask_of(n), EPSILON).tolist() == pytest.approx(plain, abs=1e-6)
    kept = [length if keeps else 0 for length, keeps in zip(n, k, strict=True)]
    centred = slow(slow_mean, r, g, k)
    with_baseline = first_of_rows(whitened(token_rows(centred, kept), unbiased=1, epsilon=EPSILON), kept)
    found = reinforce_plus_plus_baseline_advantages(rewards, groups, mask_of(n), EPSILON, keep=keep)
    assert found.tolist() == pytest.approx(with_baseline, abs=1e-6)


def test_long_right_answers_and_short_wrong_ones():
    """Four right answers of 160 tokens and four wrong ones of 20: over rows it would be +1 and -1.

    Within 1e-3, the share of the sample variance, NeMo RL (nemo_rl/algorithms/advantage_estimator.py) and OpenRLHF
    (openrlhf/trainer/ppo_utils/experience_maker.py) have the same.
    """
    rewards, lengths = [1.0] * 4 + [0.0] * 4, [160] * 4 + [20] * 4
    verl, nemo = (first_of_rows(whitened(token_rows(rewards, lengths), u), lengths) for u in (1, 0))
    assert verl[::4] == pytest.approx([0.3533, -2.8264], abs=5e-4)
    found = reinforce_plus_plus_advantages(torch.tensor(rewards), mask_of(lengths), 1e-8)
    assert found.tolist() == pytest.approx(verl, rel=1e-6)
    assert found.tolist() == pytest.approx(nemo, rel=1e-3)
    groups = torch.tensor([0, 1] * 4)
    baseline = reinforce_plus_plus_baseline_advantages(torch.tensor(rewards), groups, mask_of(lengths), 1e-8)
    assert baseline.tolist() == pytest.approx(verl, rel=1e-6)


@pytest.mark.parametrize("estimate", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("name", BY_NAME)
def test_divergence_in_the_reward(name, estimate):
    """verl/trainer/ppo/ray_trainer.py, `apply_kl_penalty`, and `kl_penalty_forward` and estimators of core_algos.py.

    Token rewards are the score at the last token less beta times the divergence at each; outcome estimators sum them
    over the row, REINFORCE++ over a token and those after it.
    """
    r = random.Random(1)
    beta, lengths, groups = 0.3, [5, 2, 7, 3, 4, 6], [0, 0, 0, 1, 1, 1]
    scores = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    old = [[r.gauss(-1, 1) for _ in range(n)] for n in lengths]
    reference = [[p + r.gauss(0, 0.5) for p in row] for row in old]
    old[2][3] = reference[2][3] - 5.0

    def kl(p, q):
        ratio = math.exp(max(-20.0, min(20.0, q - p)))
        k3 = max(-10.0, min(10.0, ratio - (q - p) - 1))
        return {"k1": p - q, "abs": abs(p - q), "k2": 0.5 * (p - q) ** 2, "k3": k3}[estimate]

    token_rewards = []
    for score, row, ref in zip(scores, old, reference, strict=True):
        penalties = [beta * kl(p, q) for p, q in zip(row, ref, strict=True)]
        token_rewards.append([score * (i == len(row) - 1) - x for i, x in enumerate(penalties)])
    totals = [math.fsum(row) for row in token_rewards]
    keep = [True] * len(scores)
    if name == "reinforce_plus_plus":
        returns = [[math.fsum(row[t:]) for t in range(len(row))] for row in token_rewards]
        expected = whitened([(x, True) for row in returns for x in row], unbiased=1)
    elif name == "reinforce_plus_plus_baseline":
        centred = slow(slow_mean, totals, groups, keep)
        expected = first_of_rows(whitened(token_rows(centred, lengths), unbiased=1), lengths)
    else:
        expected = slow(BY_NAME[name], totals, groups, keep)

    def padded(rows):
        return torch.tensor([[*row, *[math.nan] * (7 - len(row))] for row in rows], dtype=torch.float64)

    mask = mask_of(lengths)
    penalties = kl_penalties(padded(old), padded(reference), mask, beta, estimate)
    inputs = Scores(
        rewards=torch.tensor(scores, dtype=torch.float64),
        groups=torch.tensor(groups),
        keep=torch.tensor(keep),
        mask=mask,
        penalties=penalties,
    )
    found = CONFIGURED[name](inputs, 1e-9 if "plus_plus" in name else EPSILON)
    assert found.shape == (mask.shape if name == "reinforce_plus_plus" else (6,))
    values = found[mask] if found.ndim == 2 else found
    assert values.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=30)
@given(reward=st.floats(-1e3, 1e3), count=st.integers(1, 9))
def test_equal_rewards_and_lone_rows_give_exactly_zero(name, reward, count):
    estimator, _ = ESTIMATORS[name]
    rewards = torch.tensor([reward] * count + [5.0], dtype=torch.float64)
    groups = torch.tensor([4] * count + [8])
    assert estimator(rewards, groups, None).count_nonzero() == 0


def test_golden_group():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int32), 0.0)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


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


def test_a_rejected_row_is_not_normalised_with_the_others():
    scores = Scores(
        rewards=torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64),
        groups=torch.zeros(3, dtype=torch.int64),
        keep=torch.tensor([True, True, False]),
        mask=torch.ones(3, 2, dtype=torch.bool),
    )
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        found = CONFIGURED[name](scores, 0.0)
        assert found.tolist() == pytest.approx([found[0].item(), -found[0].item(), 0.0]), name
        assert found[0] < 0


def test_only_what_is_normalised_over_tokens_depends_on_which_tokens_count():
    """A step corrects its rows for the others once, in the trainer."""
    rewards, groups = torch.tensor([0.0, 1.0, 0.5, 3.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    masks = torch.ones(4, 3, dtype=torch.bool), torch.tensor([[True], [False], [True], [False]]).expand(4, 3)
    for name, estimator in CONFIGURED.items():
        given = [Scores(rewards=rewards, groups=groups, keep=masks[0][:, 0], mask=mask) for mask in masks]
        found = [estimator(scores, EPSILON) for scores in given]
        assert found[0].equal(found[1]) == (name not in OVER_TOKENS), name


@pytest.mark.parametrize("name", BY_NAME)
def test_of_one_turn_each_advantages_are_those_of_the_rows(name):
    """Also where tokens within a turn do not count."""
    mask = torch.tensor([[True, True, False], [True, False, False], [True, False, True], [False, True, True]])
    rewards = torch.tensor([0.0, 1.0, 0.5, 3.0], dtype=torch.float64)
    scores = Scores(
        rewards=rewards, groups=torch.zeros(4, dtype=torch.int64), keep=torch.ones(4, dtype=torch.bool), mask=mask
    )
    turns = [TurnReward(row, 1, 0, 3, reward) for row, reward in enumerate(rewards.tolist())]
    found = turn_advantages(scores, turns, CONFIGURED[name], EPSILON)
    expected = CONFIGURED[name](scores, EPSILON)
    assert expected.any()
    assert found.tolist() == expected[:, None].expand(4, 3).tolist()


@pytest.mark.parametrize("turns", [[], [TurnReward(0, 0, 0, 0, 0.5)]])
@pytest.mark.parametrize("name", CONFIGURED)
def test_where_no_episode_has_a_turn_of_the_policy_advantages_are_zero(name, turns):
    scores = Scores(
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        groups=torch.tensor([0, 0]),
        keep=torch.ones(2, dtype=torch.bool),
        mask=torch.zeros(2, 3, dtype=torch.bool),
    )
    found = turn_advantages(scores, turns, CONFIGURED[name], EPSILON)
    assert found.dtype == torch.float64
    assert found.tolist() == torch.zeros(2, 3).tolist()


def slow_penalty(length, max_length, buffer, penalty):
    start = max_length - buffer
    if length <= start:
        return 0.0
    return -penalty if length > max_length else penalty * (start - length) / buffer


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 100), st.floats(0, 5))
def test_overlong_penalty_equals_the_piecewise_formula(lengths, buffer, penalty):
    result = overlong_penalty(torch.tensor(lengths), 200, buffer, penalty)
    assert result.tolist() == pytest.approx([slow_penalty(n, 200, buffer, penalty) for n in lengths])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_informative_groups_equal_an_independent_loop(rows):
    rewards, groups, keep = (torch.tensor(column) for column in zip(*rows, strict=True))
    values = {group: {r for r, g, k in rows if g == group and k} for group in range(4)}
    assert informative(rewards, groups, keep).tolist() == [len(values[g]) > 1 for _, g, _ in rows]
    everything = {group: {r for r, g, _ in rows if g == group} for group in range(4)}
    assert informative(rewards, groups).tolist() == [len(everything[g]) > 1 for _, g, _ in rows]
