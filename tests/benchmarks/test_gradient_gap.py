"""Tokens at a bound of the clip: which are nearest, and that they land on its other side."""

import math

import pytest
import torch

from benchmarks.studies.gradient_gap import flipped, to_bound
from fp8core.config.loss import LossConfig
from fp8core.rl.batch import RolloutBatch, TokenBatch

LOSS = LossConfig(clip_low=0.2, clip_high=0.28)


@pytest.fixture
def batch():
    rows = TokenBatch.of([[1], [1]], [[2, 3, 4], [5, 6]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old = torch.zeros(2, 3)
    return RolloutBatch(rows, mask, old, old, None, torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool))


def test_the_bound_is_the_one_that_the_advantage_meets(batch):
    distances = to_bound(torch.full((2, 3), 0.1), batch, LOSS)
    assert distances[0].tolist() == pytest.approx([0.1 - math.log(1.28)] * 3)
    assert distances[1, :2].tolist() == pytest.approx([0.1 - math.log(0.8)] * 2)
    assert distances[1, 2] == math.inf


def test_the_nearest_tokens_and_no_others_land_on_the_other_side(batch):
    logprobs = torch.tensor([[0.24, 0.0, 0.3], [-0.2, 1.0, 0.0]])
    before = to_bound(logprobs, batch, LOSS)
    after = to_bound(logprobs, flipped(batch, before, 2), LOSS)
    moved = torch.tensor([[True, False, False], [True, False, False]])
    assert torch.allclose(after[moved], -before[moved])
    assert torch.equal(after[~moved], before[~moved])
