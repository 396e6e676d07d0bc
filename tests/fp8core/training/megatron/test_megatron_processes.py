"""Two processes, and four, compute what one computes, however the model is spread over them.

Megatron's distributed optimiser and its communication run behind a pretended GPU; the trainer that a run builds, with
its children, runs as it is.
"""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from grid_worker import POLICIES, families_used, grids, train, trainer_of, work
from pretended_gpu import pretended_gpu
from torch import multiprocessing

from fp8core.config.load import load_config
from fp8core.training.megatron import parallel
from fp8core.training.megatron.processes import GridTrainer, ProcessError

pytestmark = pytest.mark.slow

FP32 = ["precision.rollout={linear: fp32, kv_cache: fp32}", "precision.training={linear: fp32, kv_cache: fp32}"]


@pytest.fixture(scope="module")
def policies(architecture, masters_of):
    return {name: (arch := architecture(**POLICIES[name]), masters_of(arch)) for name in families_used()}


@pytest.fixture(scope="module")
def alone(policies, ragged_batch, tmp_path_factory):
    """What one process computes, by family."""
    with pretended_gpu():
        folder = tmp_path_factory.mktemp("alone")
        found = {name: train(*policies[name], ragged_batch, 1, folder / name) for name in policies}
    parallel.destroy()
    return found


ALL = {**grids(2), **grids(4)}
PIPELINES = [name for name, (_, spread) in ALL.items() if "pipeline_parallel" in spread]


@pytest.fixture(scope="module")
def together(policies, ragged_batch, tmp_path_factory):
    """What two processes compute and what four do, by grid, and where the checkpoint of each is."""
    found = {}
    for count in (2, 4):
        folder = tmp_path_factory.mktemp("together")
        multiprocessing.spawn(work, (str(folder), policies, ragged_batch, count), nprocs=count)
        for number, name in enumerate(grids(count)):
            place = folder / str(number)
            found[name] = torch.load(place / "found.pt", weights_only=False) | {"state": place / "state"}
    return found


@pytest.mark.parametrize("grid", ALL)
def test_a_grid_computes_what_one_process_does(grid, alone, together, ragged_batch):
    found, expected = together[grid], alone[ALL[grid][0]]
    mask = ragged_batch.mask
    assert torch.allclose(found["logprobs"][mask], expected["logprobs"][mask], rtol=0, atol=1e-5)
    assert found["elements"] == expected["elements"]
    for ours, theirs in zip(found["amax"], expected["amax"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    steps = (*zip(found["steps"], expected["steps"], strict=True), (found["replayed"], expected["replayed"]))
    for ours, theirs in steps:
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    assert largest(found["masters"], expected["masters"]) < 1e-4
    if "gradients" in found:
        assert largest(found["gradients"], expected["gradients"]) < 1e-5


@pytest.mark.parametrize("grid", [name for name in PIPELINES if ALL[name][0] in ("tied", "deep")])
def test_the_first_and_the_last_stage_have_one_embedding(grid, together):
    """Tied weights lie on both: they stay the same bytes while each stage updates its own."""
    first, *others = together[grid]["copies"]
    assert len(others) == (3 if grid == "pipeline and data" else 1)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("grid", [name for name in PIPELINES if "expert_parallel" not in ALL[name][1]])
def test_a_checkpoint_of_stages_is_read_by_one_process(grid, together, policies, ragged_batch):
    family, spread = ALL[grid]
    with pretended_gpu(), contextlib.ExitStack() as stack:
        stack.callback(parallel.destroy)
        trainer = trainer_of(*policies[family], 1, distributed_optimizer=spread.get("distributed_optimizer", True))
        trainer.load(together[grid]["state"])
        again = vars(trainer.step(ragged_batch, 0.9, None))
        assert again["grad_norm"] == pytest.approx(together[grid]["again"]["grad_norm"], rel=1e-5)
        assert largest(trainer.masters, together[grid]["masters"]) < 1e-4


def largest(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


@pytest.mark.parametrize("grid", ALL)
def test_a_grid_goes_on_from_its_checkpoint_bit_for_bit(grid, together):
    assert together[grid]["again"] == together[grid]["steps"][1]


@pytest.fixture
def grid_trainer(policies, ragged_batch):
    """The trainer that a run builds, on two processes of this CPU."""
    grid = ["training.trainer=megatron", "training.megatron.gpus=2", "training.megatron.tensor_parallel=2"]
    trainer = GridTrainer(load_config("tiny", [*FP32, *grid]), *policies["qwen3"])
    yield trainer
    trainer.close()


def test_the_trainer_of_a_run_brings_its_processes(grid_trainer, policies, alone, ragged_batch, tmp_path):
    found = grid_trainer.logprobs(ragged_batch.sequences, 0.9, None).logprobs
    mask = ragged_batch.mask
    assert torch.allclose(found[mask], alone["qwen3"]["logprobs"][mask], rtol=0, atol=1e-5)
    weights = grid_trainer.masters
    assert all(torch.equal(weights[name], tensor) for name, tensor in policies["qwen3"][1].items())
    grid_trainer.step(ragged_batch, 0.9, None)
    grid_trainer.save(tmp_path)
    digest, expected = grid_trainer.digest(), grid_trainer.step(ragged_batch, 0.9, None)
    grid_trainer.load(tmp_path)
    assert (grid_trainer.version, grid_trainer.digest()) == (1, digest)
    assert grid_trainer.step(ragged_batch, 0.9, None) == expected


def test_a_checkpoint_of_two_processes_is_read_by_one(grid_trainer, policies, ragged_batch, tmp_path):
    grid_trainer.step(ragged_batch, 0.9, None)
    grid_trainer.save(tmp_path)
    weights = grid_trainer.masters
    grid_trainer.close()
    one = GridTrainer(load_config("tiny", [*FP32, "training.trainer=megatron"]), *policies["qwen3"])
    try:
        one.load(tmp_path)
        assert all(torch.equal(one.masters[name], weights[name]) for name in weights)
    finally:
        one.close()


def test_a_process_that_is_killed_fails_the_next_call(grid_trainer, ragged_batch):
    (child,) = grid_trainer._children._processes
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with pytest.raises(ProcessError, match=r"process \d of the Megatron trainer failed"):
        grid_trainer.step(ragged_batch, 0.9, None)


def test_a_child_may_have_processes_of_its_own(grid_trainer):
    """Libraries compile and write with some, which a daemon is refused."""
    assert not any(child.daemon for child in grid_trainer._children._processes)


_STUCK = """
import sys, time
from pathlib import Path
from fp8core.training.megatron.processes import Children

class Stuck:
    def build(self, rank):
        print("ready", flush=True)
        time.sleep(600)

if __name__ == "__main__":
    children = Children(Path(sys.argv[1]), 2, 1)
    (child,) = children._processes
    print(child.pid, flush=True)
    children._send("build", 0, Stuck())
    sys.stdin.read()
"""


def test_a_child_in_a_call_that_does_not_end_is_gone_with_a_training_that_was_killed(tmp_path):
    program, place = tmp_path / "program.py", tmp_path / "place"
    program.write_text(_STUCK)
    place.mkdir()
    command = [sys.executable, str(program), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        child = psutil.Process(int(training.stdout.readline()))
        assert training.stdout.readline() == "ready\n"
        training.kill()
        child.wait(20)


_FAILING = """
import sys, time
from pathlib import Path
from fp8core.training.megatron import processes

class Waiting:
    def build(self, rank):
        time.sleep(600)

def fail():
    raise LookupError("what failed here")

if __name__ == "__main__":
    processes._PATIENCE_SECONDS = 1.0
    grid = processes.Children(Path(sys.argv[1]), 2, 1)
    grid._send("build", 0, Waiting())
    try:
        grid._accompany(fail)
    except processes.ProcessError as error:
        print(error, type(error.__cause__).__name__, flush=True)
    (child,) = grid._processes
    child.join(20)
    print(child.exitcode, flush=True)
    grid.end()
"""


def test_a_failure_here_does_not_wait_for_children_that_wait_for_it(tmp_path):
    """Whatever is raised: Megatron's checks of a checkpoint raise in the first process alone."""
    program, place = tmp_path / "program.py", tmp_path / "place"
    program.write_text(_FAILING)
    place.mkdir()
    command = [sys.executable, str(program), str(place)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = "process 0 of the Megatron trainer failed: what failed here LookupError"
    assert finished.stdout.splitlines() == [said, str(-signal.SIGKILL)], finished.stderr
    assert finished.returncode == 0


_WAITING = """
import sys, time
from pathlib import Path
from fp8core.training.megatron import processes

if __name__ == "__main__":
    processes.STUCK_SECONDS = 1.0
    grid = processes.Children(Path(sys.argv[1]), 2, 1)
    (child,) = grid._processes
    print(child.pid, flush=True)
    grid._accompany(lambda: time.sleep(600))
"""


def test_a_training_that_waits_for_a_child_in_vain_ends(tmp_path):
    """As in a collective over NCCL, which neither notices nor can be interrupted."""
    program, place = tmp_path / "program.py", tmp_path / "place"
    program.write_text(_WAITING)
    place.mkdir()
    command = [sys.executable, str(program), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        psutil.Process(int(training.stdout.readline())).kill()
        _, said = training.communicate(timeout=60)
    assert training.returncode == -signal.SIGKILL
    assert "a process of the Megatron trainer ended (exit code [-9])" in said
