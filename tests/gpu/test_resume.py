"""A training that is killed and resumed on one GPU learns beside a sleeping engine, and comes to the same end."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.harness import run_till, training_command
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
CACHE, STEPS, KILLED = 24, 4, 2
SETTINGS = [
    *("steps=4", "warm_start.steps=3", "warm_start.batch_size=16", "checkpoint.every=100"),
    *("evaluation={every: 100, prompts: 8}", "rollout.prompts_per_step=16", "rollout.group_size=4"),
    *("reward.verifier=benchmarks.random_reward:score", "training.learning_rate=0.01"),
    *("rollout.vllm.sleep=true", f"rollout.vllm.kv_cache_gib={CACHE}", "rollout.vllm.gpu_memory_utilization=0.5"),
]
MODES = {
    "synchronous": [],
    "in_turn": ["pipeline.mode=asynchronous", "pipeline.max_staleness=1", "pipeline.ahead_tokens=0"],
}
_SECONDS = 240.0


@contextmanager
def watched() -> Iterator[list[tuple[float, float]]]:
    """Times (Unix seconds) and GiB that were free on the GPU then."""
    found, done = list[tuple[float, float]](), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            found.append((time.time(), torch.cuda.mem_get_info()[0] / (1 << 30)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def ledger(folder: Path) -> LedgerView | None:
    path = folder / LEDGER
    return LedgerView.read(path) if path.exists() and path.stat().st_size else None


def train(folder: Path, settings: Sequence[str], till: Callable[[LedgerView], bool]) -> None:
    """Start it, or go on with it, until `till` of its ledger is true; then it is killed."""
    command = training_command("h200-small", [*settings, f"runs={folder.parent}", f"run={folder.name}"])
    with (folder.parent / "log").open("wb") as log:
        run_till(
            command, log, lambda: (found := ledger(folder)) is not None and till(found), time.monotonic() + _SECONDS
        )
    output = (folder.parent / "log").read_text(errors="replace")[-6000:]
    found = ledger(folder)
    assert found is not None, output
    assert till(found), output


def ended(found: LedgerView) -> bool:
    return (found.last_step() or 0) >= STEPS


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training_has_the_memory_of_a_sleeping_engine(tmp_path: Path, mode: str) -> None:
    settings = [*SETTINGS, *MODES[mode]]
    train(tmp_path / "whole", settings, ended)
    train(tmp_path / "killed", settings, lambda found: "rollout" in found.tasks(KILLED))
    assert "train" not in ledger(tmp_path / "killed").tasks(KILLED), "it was killed too late"
    with watched() as samples:
        train(tmp_path / "killed", settings, ended)
    whole, killed = (ledger(tmp_path / name) for name in ("whole", "killed"))
    for step in range(KILLED, STEPS + 1):
        assert killed.step(step).weights_digest == whole.step(step).weights_digest
        update = killed.tasks(step)["train"]
        # An engine may fall asleep within the task.
        begin, end = update.started + update.seconds / 2, update.started + update.seconds
        free = [gib for at, gib in samples if begin <= at <= end]
        assert min(free) > min(gib for _, gib in samples) + CACHE / 2, f"step {step}"
