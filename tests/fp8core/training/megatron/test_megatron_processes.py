"""Two processes, and four, compute what one computes, however the model is spread over them.

Megatron's distributed optimiser and its communication run behind a pretended GPU.
"""

import pytest
import torch
from grid_worker import families_used, grids, train, work
from megatron_cases import FAMILIES
from pretended_gpu import pretended_gpu
from torch import multiprocessing

from fp8core.cluster.transport import Rendezvous
from fp8core.training.megatron import parallel
from fp8core.training.ranks import ALONE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policies(architecture, masters_of):
    return {name: (arch := architecture(**FAMILIES[name]), masters_of(arch, 1)) for name in families_used()}


@pytest.fixture(scope="module")
def alone(policies, ragged_batch, tmp_path_factory):
    """What one process computes, by family."""
    with pretended_gpu():
        folder = tmp_path_factory.mktemp("alone")
        found = {name: train(*policies[name], ragged_batch, ALONE, folder / name) for name in policies}
    parallel.destroy()
    return found


ALL = {**grids(2), **grids(4)}


@pytest.fixture(scope="module")
def together(policies, ragged_batch, tmp_path_factory):
    """What two processes compute and what four do, by grid, and where the checkpoint of each is."""
    # They come from a process that has imported Megatron Core, which takes seconds, and has computed nothing.
    multiprocessing.set_forkserver_preload(["fp8core.training.megatron.trainer"])
    found = {}
    for count in (2, 4):
        folder, meeting = tmp_path_factory.mktemp("together"), Rendezvous("127.0.0.1")
        arguments = (meeting.port(), str(folder), policies, ragged_batch, count)
        multiprocessing.start_processes(work, arguments, nprocs=count, start_method="forkserver")
        for number, name in enumerate(grids(count)):
            place = folder / str(number)
            found[name] = torch.load(place / "found.pt", weights_only=False) | {"state": place / "state"}
    return found


@pytest.mark.parametrize("grid", ALL)
def test_a_grid_computes_what_one_process_does(grid, alone, together, ragged_batch):
    found, expected = together[grid], alone[ALL[grid][0]]
    mask = ragged_batch.policy_mask
    assert torch.allclose(found["logprobs"][mask], expected["logprobs"][mask], rtol=0, atol=1e-5)
    for ours, theirs in zip(found["amax"], expected["amax"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    steps = (*zip(found["steps"], expected["steps"], strict=True), (found["replayed"], expected["replayed"]))
    for ours, theirs in steps:
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "router_load", "router_z"):
            # Dense models have no router.
            assert ours[name] is theirs[name] is None or ours[name] == pytest.approx(
                theirs[name], rel=1e-5, abs=1e-5
            ), name
    assert largest(found["masters"], expected["masters"]) < 1e-4
    if "gradients" in found:
        assert largest(found["gradients"], expected["gradients"]) < 1e-5


def largest(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


@pytest.mark.parametrize("grid", ALL)
def test_a_grid_goes_on_from_its_checkpoint_bit_for_bit(grid, together):
    assert together[grid]["again"] == together[grid]["steps"][1]
