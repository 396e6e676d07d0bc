"""A fault anywhere in the loop turns the verdict red, also when the engine's read-back does not notice it."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.config.parity import ParityConfig
from fp8core.numerics.fingerprint import policy_digest
from fp8core.parity.measure import VARIANTS, measure, variant_settings
from fp8core.parity.verdict import ParityVerdict, judge
from fp8core.report.console import Console
from fp8core.report.run_data import read_run
from fp8core.rollout.engine import PolicyScales, SyncReport
from fp8core.run.checks.settings import graph_of
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.run.open import open_directory, open_run

VARIANT = "fp8-end-to-end-kv"


class LyingEngine:
    """An engine whose first decoder layer is never updated, and that reports what it was sent."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._first: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, tensors: Mapping[str, Any], scales: PolicyScales, version: int) -> SyncReport:
        self._first = self._first or dict(tensors)
        held = {name: self._first[name] if ".layers.0." in name else tensor for name, tensor in tensors.items()}
        self._engine.update(held, scales, version)
        return SyncReport(version=version, digest=policy_digest(tensors), scales=scales)


class SkippingTrainer:
    """A trainer whose updates are computed and, from the second on, not applied."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def step(self, *arguments: Any) -> Any:
        before = {name: tensor.detach().clone() for name, tensor in self._trainer.masters.items()}
        report = self._trainer.step(*arguments)
        if report.version < 2:
            return report
        with torch.no_grad():
            for name, tensor in before.items():
                self._trainer.masters[name].copy_(tensor)
        return replace(report, digest=self._trainer.digest())


FAULTS = {
    "none": lambda run: None,
    "stale layer": lambda run: setattr(run, "engine", LyingEngine(run.engine)),
    "skipped update": lambda run: setattr(run, "trainer", SkippingTrainer(run.trainer)),
}


@pytest.fixture(scope="module")
def judged(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ParityVerdict]:
    """The verdict on three steps with a fault, all from one warm start: judged(fault)."""
    runs = tmp_path_factory.mktemp("faults")
    # Updates that move weights by more than FP8 rounds away.
    base = {**small, "runs": str(runs), "steps": 3, "training.learning_rate": 0.05, "training.warmup_steps": 0}

    def train(fault: str) -> ParityVerdict:
        config = load_config("tiny", {**base, **variant_settings(VARIANTS[VARIANT], load_config("tiny", base), 0)})
        folder = runs / fault.replace(" ", "-")
        with (
            open_directory(config, folder.name) as directory,
            open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
        ):
            begin(run)
            FAULTS[fault](run)
            for index in range(1, config.steps + 1):
                iterate(run, index, carried(run, index))
        measured = [measure(read_run(folder, folder.name), VARIANT, 0, 1)]
        return judge(measured, ParityConfig(), variants=[VARIANT], seeds=[0], platform="cpu", failures={})

    return train


def test_without_a_fault_nothing_fails(judged):
    found = judged("none")
    assert found.failed == []
    # One seed is no interval.
    assert found.outcome == "NOT ENOUGH DATA"


def test_an_engine_that_holds_something_else_turns_the_verdict_red(judged):
    found = judged("stale layer")
    assert found.outcome == "FAIL"
    assert "largest probability error" in [check.name for check in found.failed]


def test_a_skipped_update_turns_the_verdict_red(judged):
    found = judged("skipped update")
    assert [(check.name, check.found) for check in found.failed] == [
        ("skipped updates", "seed 0, step 2, seed 0, step 3")
    ]
