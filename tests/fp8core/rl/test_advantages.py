import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.advantages import (
    ESTIMATORS,
    OVER_TOKENS,
    Scores,
    TurnReward,
    informative,
    kl_penalties,
    overlong_penalty,
    turn_advantages,
)

EPSILON = 1e-4


def slow_grpo(rewards, own, others):
    return (own - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)


def slow_dr_grpo(rewards, own, others):
    return own - statistics.fmean(rewards)


def slow_rloo(rewards, own, others):
    return own - statistics.fmean(others)


def slow_leave_one_out(rewards, own, others):
    std = statistics.stdev(others) if len(others) > 1 else 0.0
    return (own - statistics.fmean(others)) / (std + EPSILON if std else 1.0)


FORMULAS = {"grpo": slow_grpo, "dr_grpo": slow_dr_grpo, "rloo": slow_rloo, "leave_one_out": slow_leave_one_out}


def slow(formula, rewards, groups, keep):
    """Independent: one row at a time, Python's statistics module."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [j for j, other in enumerate(groups) if other == group and keep[j]]
        alone = not keep[i] or len(mates) < 2
        values, others = [rewards[j] for j in mates], [rewards[j] for j in mates if j != i]
        result.append(0.0 if alone else formula(values, reward, others))
    return result


def scores_of(rewards, groups=None, keep=None, mask=None, **penalties):
    n = len(rewards)
    return Scores(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups or [0] * n),
        keep=torch.tensor(keep or [True] * n),
        mask=torch.ones(n, 3, dtype=torch.bool) if mask is None else mask,
        **penalties,
    )


REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, 100.0])
ROWS = st.lists(st.tuples(REWARDS, st.integers(-2, 3), st.booleans(), st.integers(0, 9)), min_size=1, max_size=16)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=60)
@given(rows=ROWS)
def test_each_estimator_equals_an_independent_loop(name, rows):
    rewards, groups, keep, _ = (list(column) for column in zip(*rows, strict=True))
    expected = slow(FORMULAS[name], rewards, groups, keep)
    found = ESTIMATORS[name](scores_of(rewards, groups, keep), EPSILON)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


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


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40)
@given(episodes=EPISODES)
def test_a_turn_is_compared_with_those_of_its_number(name, episodes):
    """By what follows it; two tokens of observation after each turn get nothing, nor does the first answer count."""
    groups, keep, first, turns = (list(column) for column in zip(*episodes, strict=True))
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
        advantages = slow(FORMULAS[name], following, [0] * len(mates), [keep[i] for i in mates])
        expected[span.row, span.begin : span.end] = advantages[mates.index(span.row)]
    whole = [math.fsum([first[row], *(reward for reward, _ in of_row)]) for row, of_row in enumerate(turns)]
    found = turn_advantages(scores_of(whole, groups, keep, mask), spans, ESTIMATORS[name], EPSILON)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def whitened(values, unbiased=1, epsilon=0.0):
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


@settings(max_examples=80)
@given(rows=ROWS.filter(lambda rows: len(rows) > 1))
def test_reinforce_plus_plus_is_normalised_over_tokens(rows):
    """verl/trainer/ppo/core_algos.py, `compute_reinforce_plus_plus[_baseline]_outcome_advantage`."""
    rewards, groups, keep, lengths = (list(column) for column in zip(*rows, strict=True))
    kept = [length if keeps else 0 for length, keeps in zip(lengths, keep, strict=True)]
    scores = scores_of(rewards, groups, keep, mask_of(lengths))
    bases = {"reinforce_plus_plus": rewards, "reinforce_plus_plus_baseline": slow(slow_dr_grpo, rewards, groups, keep)}
    for name, values in bases.items():
        expected = first_of_rows(whitened(token_rows(values, kept), epsilon=EPSILON), kept)
        assert ESTIMATORS[name](scores, EPSILON).tolist() == pytest.approx(expected, abs=1e-6), name


def test_long_right_answers_and_short_wrong_ones():
    """Four right answers of 160 tokens and four wrong ones of 20: over rows it would be +1 and -1.

    Within 1e-3, the share of the sample variance, NeMo RL (nemo_rl/algorithms/advantage_estimator.py) and OpenRLHF
    (openrlhf/trainer/ppo_utils/experience_maker.py) have the same.
    """
    rewards, lengths = [1.0] * 4 + [0.0] * 4, [160] * 4 + [20] * 4
    verl, nemo = (first_of_rows(whitened(token_rows(rewards, lengths), u), lengths) for u in (1, 0))
    assert verl[::4] == pytest.approx([0.3533, -2.8264], abs=5e-4)
    scores = scores_of(rewards, [0, 1] * 4, mask=mask_of(lengths))
    found = ESTIMATORS["reinforce_plus_plus"](scores, 1e-8).tolist()
    assert found == pytest.approx(verl, rel=1e-6)
    assert found == pytest.approx(nemo, rel=1e-3)
    assert ESTIMATORS["reinforce_plus_plus_baseline"](scores, 1e-8).tolist() == pytest.approx(verl, rel=1e-6)


@pytest.mark.parametrize("estimate", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_divergence_in_the_reward(name, estimate):
    """verl/trainer/ppo/ray_trainer.py, `apply_kl_penalty`, and `kl_penalty_forward` and estimators of core_algos.py.

    Token rewards are the score at the last token less beta times the divergence at each; outcome estimators sum them
    over the row, REINFORCE++ over a token and those after it.
    """
    r = random.Random(1)
    beta, lengths, groups = 0.3, [5, 2, 7, 3, 4, 6], [0, 0, 0, 1, 1, 1]
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    old = [[r.gauss(-1, 1) for _ in range(n)] for n in lengths]
    reference = [[p + r.gauss(0, 0.5) for p in row] for row in old]
    old[2][3] = reference[2][3] - 5.0

    def kl(p, q):
        ratio = math.exp(max(-20.0, min(20.0, q - p)))
        k3 = max(-10.0, min(10.0, ratio - (q - p) - 1))
        return {"k1": p - q, "abs": abs(p - q), "k2": 0.5 * (p - q) ** 2, "k3": k3}[estimate]

    token_rewards = []
    for reward, row, ref in zip(rewards, old, reference, strict=True):
        penalties = [beta * kl(p, q) for p, q in zip(row, ref, strict=True)]
        token_rewards.append([reward * (i == len(row) - 1) - x for i, x in enumerate(penalties)])
    totals, keep = [math.fsum(row) for row in token_rewards], [True] * 6
    if name == "reinforce_plus_plus":
        returns = [[math.fsum(row[t:]) for t in range(len(row))] for row in token_rewards]
        expected = whitened([(x, True) for row in returns for x in row])
    elif name == "reinforce_plus_plus_baseline":
        centred = slow(slow_dr_grpo, totals, groups, keep)
        expected = first_of_rows(whitened(token_rows(centred, lengths)), lengths)
    else:
        expected = slow(FORMULAS[name], totals, groups, keep)

    def padded(rows):
        return torch.tensor([[*row, *[math.nan] * (7 - len(row))] for row in rows], dtype=torch.float64)

    mask = mask_of(lengths)
    penalties = kl_penalties(padded(old), padded(reference), mask, beta, estimate)
    scores = scores_of(rewards, groups, mask=mask, penalties=penalties)
    found = ESTIMATORS[name](scores, 1e-9 if name in OVER_TOKENS else EPSILON)
    values = found[mask] if found.ndim == 2 else found
    assert values.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=30)
@given(reward=st.floats(-1e3, 1e3), count=st.integers(1, 9))
def test_equal_rewards_and_lone_rows_give_exactly_zero(name, reward, count):
    scores = scores_of([reward] * count + [5.0], [4] * count + [8])
    assert ESTIMATORS[name](scores, EPSILON).count_nonzero() == 0


def test_golden_group():
    assert ESTIMATORS["grpo"](scores_of([1.0, 0.0, 0.0, 0.0]), 0.0).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rejected", [100.0, math.nan])
def test_a_rejected_row_moves_no_other(rejected):
    """Of rewards 100 and 1, one rejected, the kept one has no baseline (verl would give it -49.5)."""
    assert ESTIMATORS["dr_grpo"](scores_of([100.0, 1.0]), EPSILON).tolist() == [49.5, -49.5]
    for name, estimator in ESTIMATORS.items():
        found = estimator(scores_of([rejected, 1.0, 0.0], keep=[False, True, True]), EPSILON)
        alone = estimator(scores_of([1.0, 0.0]), EPSILON)
        assert found.tolist() == pytest.approx([0.0, *alone.tolist()]), name


def test_only_what_is_normalised_over_tokens_depends_on_which_tokens_count():
    masks = torch.ones(4, 3, dtype=torch.bool), torch.tensor([[True], [False], [True], [False]]).expand(4, 3)
    for name, estimator in ESTIMATORS.items():
        found = [estimator(scores_of([0.0, 1.0, 0.5, 3.0], [0, 0, 1, 1], mask=mask), EPSILON) for mask in masks]
        assert found[0].equal(found[1]) == (name not in OVER_TOKENS), name


@pytest.mark.parametrize("name", ESTIMATORS)
def test_of_one_turn_each_advantages_are_those_of_the_rows(name):
    """Also where tokens within a turn do not count."""
    mask = torch.tensor([[True, True, False], [True, False, False], [True, False, True], [False, True, True]])
    rewards = [0.0, 1.0, 0.5, 3.0]
    scores = scores_of(rewards, mask=mask)
    turns = [TurnReward(row, 1, 0, 3, reward) for row, reward in enumerate(rewards)]
    found = turn_advantages(scores, turns, ESTIMATORS[name], EPSILON)
    expected = ESTIMATORS[name](scores, EPSILON)
    assert expected.any()
    assert found.tolist() == expected[:, None].expand(4, 3).tolist()
    for none in ([], [TurnReward(0, 0, 0, 0, 0.5)]):
        assert not turn_advantages(scores, none, ESTIMATORS[name], EPSILON).any()


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 100), st.floats(0, 5))
def test_overlong_penalty_equals_the_piecewise_formula(lengths, buffer, penalty):
    start = 200 - buffer
    expected = [0.0 if n <= start else -penalty if n > 200 else penalty * (start - n) / buffer for n in lengths]
    assert overlong_penalty(torch.tensor(lengths), 200, buffer, penalty).tolist() == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_informative_groups_equal_an_independent_loop(rows):
    rewards, groups, keep = (torch.tensor(column) for column in zip(*rows, strict=True))
    values = {group: {r for r, g, k in rows if g == group and k} for group in range(4)}
    assert informative(rewards, groups, keep).tolist() == [len(values[g]) > 1 for _, g, _ in rows]
    everything = {group: {r for r, g, _ in rows if g == group} for group in range(4)}
    assert informative(rewards, groups).tolist() == [len(everything[g]) > 1 for _, g, _ in rows]
