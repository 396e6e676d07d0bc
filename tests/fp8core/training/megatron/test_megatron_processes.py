"""Two processes compute what one computes, however the model is spread over them.

Megatron's distributed optimiser and its communication run behind a pretended GPU; the trainer that a run builds, with
its children, runs as it is.
"""

import pytest
import torch
from grid_worker import GRIDS, families_used, train, work
from megatron_cases import FAMILIES
from pretended_gpu import pretended_gpu
from torch import multiprocessing

from fp8core.training.megatron import groups

pytestmark = pytest.mark.slow

FP32 = ["precision.rollout={linear: fp32, kv_cache: fp32}", "precision.training={linear: fp32, kv_cache: fp32}"]


@pytest.fixture(scope="module")
def policies(architecture, masters_of):
    return {name: (arch := architecture(**FAMILIES[name]), masters_of(arch)) for name in families_used()}


@pytest.fixture(scope="module")
def alone(policies, ragged_batch, tmp_path_factory):
    """What one process computes, by family."""
    with pretended_gpu():
        folder = tmp_path_factory.mktemp("alone")
        found = {name: train(*policies[name], ragged_batch, 1, folder / name) for name in policies}
    groups.leave()
    return found


@pytest.fixture(scope="module")
def together(policies, ragged_batch, tmp_path_factory):
    """What two processes compute, by grid."""
    folder = tmp_path_factory.mktemp("together")
    multiprocessing.spawn(work, (str(folder), policies, ragged_batch), nprocs=2)
    return {
        name: torch.load(folder / str(number) / "found.pt", weights_only=False) for number, name in enumerate(GRIDS)
    }


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_of_two_computes_what_one_process_does(grid, alone, together, ragged_batch):
    found, expected = together[grid], alone[GRIDS[grid][0]]
    mask = ragged_batch.mask
    assert torch.allclose(found["logprobs"][mask], expected["logprobs"][mask], rtol=0, atol=1e-5)
    assert found["elements"] == expected["elements"]
    for ours, theirs in zip(found["amax"], expected["amax"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    largest = max(float((found["masters"][n] - w).abs().max()) for n, w in expected["masters"].items())
    assert largest < 1e-4


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_goes_on_from_its_checkpoint_bit_for_bit(grid, together):
    assert together[grid]["again"] == together[grid]["steps"][1]
