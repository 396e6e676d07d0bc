import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.rl.shaping import informative, overlong_penalty, scale_rewards, without_overlong


def slow_penalty(length, max_length, buffer, penalty):
    start = max_length - buffer
    if length <= start:
        return 0.0
    return -penalty if length > max_length else penalty * (start - length) / buffer


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 100), st.floats(0, 5))
def test_overlong_penalty_equals_the_piecewise_formula(lengths, buffer, penalty):
    result = overlong_penalty(torch.tensor(lengths), 200, buffer, penalty)
    assert result.tolist() == pytest.approx([slow_penalty(n, 200, buffer, penalty) for n in lengths])


def test_overlong_penalty_by_hand():
    assert overlong_penalty(torch.tensor([0, 160, 180, 200, 500]), 200, 40).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty(torch.tensor([1]), 200, 0)


def test_scaling_clamps_and_maps():
    rewards = torch.tensor([-1.0, 0.0, 0.25, 1.0, 7.0])
    assert scale_rewards(rewards, (0.0, 1.0), (-1.0, 3.0)).tolist() == [-1.0, -1.0, 0.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="empty"):
        scale_rewards(rewards, (1.0, 1.0), (0.0, 1.0))


def test_overlong_filtering_empties_rows_and_leaves_the_mask_alone():
    mask = torch.tensor([[True, True], [True, False]])
    assert without_overlong(mask, torch.tensor([True, False])).tolist() == [[False, False], [True, False]]
    assert mask.sum() == 3


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_informative_groups_equal_an_independent_loop(rows):
    rewards, groups, keep = (torch.tensor(column) for column in zip(*rows, strict=True))
    values = {group: {r for r, g, k in rows if g == group and k} for group in range(4)}
    assert informative(rewards, groups, keep).tolist() == [len(values[g]) > 1 for _, g, _ in rows]
    everything = {group: {r for r, g, _ in rows if g == group} for group in range(4)}
    assert informative(rewards, groups).tolist() == [len(everything[g]) > 1 for _, g, _ in rows]
