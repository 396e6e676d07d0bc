"""A fault anywhere in the loop turns the verdict red, also when the engine's read-back does not notice it."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.config.load import load_config
from fp8core.config.parity import ParityConfig
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.parity.measure import VARIANTS, Measured, measure, variant_settings
from fp8core.parity.verdict import ParityVerdict, judge
from fp8core.report.console import Console
from fp8core.report.run_data import read_run
from fp8core.rl.batch import RolloutBatch
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective, ObjectiveTerms
from fp8core.rollout.engine import PolicyScales, SyncReport
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate
from fp8core.run.open import open_directory, open_run
from fp8core.training.exact import ExactTrainer

VARIANT = "fp8-end-to-end-kv"


class LyingEngine:
    """An engine that holds something else than it was sent, and reports what it was sent."""

    def __init__(self, engine: Any, fault: Callable[..., tuple[Mapping[str, Any], PolicyScales]]) -> None:
        self._engine, self._fault = engine, fault
        self._first: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, tensors: Mapping[str, Any], scales: PolicyScales, version: int) -> SyncReport:
        self._first = self._first or dict(tensors)
        self._engine.update(*self._fault(self._first, tensors, scales), version)
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


def stale_layer(first, tensors, scales):
    """The first decoder layer is never updated."""
    return {name: first[name] if ".layers.0." in name else tensor for name, tensor in tensors.items()}, scales


def wrong_kv_scale(first, tensors, scales):
    """Values of the last layer are stored with a scale that is 16 times too small: they saturate."""
    *others, last = scales.layers
    return tensors, replace(scales, layers=(*others, replace(last, v=last.v / 16)))


def wrong_weight_scale(first, tensors, scales):
    """One tile of one linear is multiplied back by twice its scale."""
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale_inv"))
    return {**tensors, name: tensors[name] * 2}, scales


class TurnedObjective(Objective):
    """Importance ratios of the updates with a wrong sign: exp(old - current)."""

    def __call__(
        self, current: Tensor, batch: RolloutBatch, denominator: Denominator, entropy: Tensor | None = None
    ) -> ObjectiveTerms:
        return super().__call__(2 * batch.old_logprobs - current, batch, denominator, entropy)


def turned_trainer(run: RunContext) -> ExactTrainer:
    config, layers = run.config, run.arch.num_layers
    formats = training_formats(config.precision, layers), rollout_formats(config.precision, layers)
    objective = TurnedObjective(config.loss, config.correction)
    return ExactTrainer(run.arch, run.initial_policy(), *formats, config.training, objective)


FAULTS = {
    "none": lambda run: None,
    "stale layer": lambda run: setattr(run, "engine", LyingEngine(run.engine, stale_layer)),
    "wrong KV scale": lambda run: setattr(run, "engine", LyingEngine(run.engine, wrong_kv_scale)),
    "wrong weight scale": lambda run: setattr(run, "engine", LyingEngine(run.engine, wrong_weight_scale)),
    "wrong sign": lambda run: setattr(run, "trainer", turned_trainer(run)),
    "skipped update": lambda run: setattr(run, "trainer", SkippingTrainer(run.trainer)),
}


@pytest.fixture(scope="module")
def judged(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ParityVerdict]:
    """The verdict on three steps with a fault, all from one warm start: judged(fault, variant, **overrides)."""
    runs = tmp_path_factory.mktemp("faults")
    # Updates that move weights by more than FP8 rounds away.
    base = {**small, "runs": str(runs), "steps": 3, "training.learning_rate": 0.05, "training.warmup_steps": 0}

    def train(fault: str, variant: str = VARIANT, **overrides: Any) -> ParityVerdict:
        asked = {**base, **overrides}
        config = load_config("tiny", {**asked, **variant_settings(VARIANTS[variant], load_config("tiny", asked), 0)})
        folder = runs / f"{variant}-{fault}".replace(" ", "-")
        with (
            open_directory(config, folder.name) as directory,
            open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
        ):
            begin(run)
            FAULTS[fault](run)
            for index in range(1, config.steps + 1):
                iterate(run, index, carried(run, index))
        return verdict([measure(read_run(folder, folder.name), variant, 0, 1)], variant)

    return train


def verdict(measured: list[Measured], variant: str = VARIANT) -> ParityVerdict:
    return judge(measured, ParityConfig(), variants=[variant], seeds=[0], platform="cpu", failures={})


def test_without_a_fault_nothing_fails(judged):
    found = judged("none")
    assert found.failed == []
    # One seed is no interval.
    assert found.outcome == "NOT ENOUGH DATA"


@pytest.mark.parametrize("fault", ["stale layer", "wrong KV scale", "wrong weight scale"])
def test_an_engine_that_holds_something_else_turns_the_verdict_red(judged, fault):
    found = judged(fault)
    assert found.outcome == "FAIL"
    assert "largest probability error" in [check.name for check in found.failed]


def test_a_skipped_update_turns_the_verdict_red(judged):
    found = judged("skipped update")
    assert [(check.name, check.found) for check in found.failed] == [
        ("skipped updates", "seed 0, step 2, seed 0, step 3")
    ]


STRESSED = {"rollout.prompts_per_step": 16, "rollout.group_size": 8, "steps": 1, "training.learning_rate": 0.0003}


@pytest.mark.slow
def test_raw_importance_weights_of_many_updates_do_not_average_1_when_their_sign_is_wrong(judged):
    assert judged("none", "stress", **STRESSED).failed == []
    found = judged("wrong sign", "stress", **STRESSED)
    assert [check.name for check in found.failed] == ["largest weight of the updates"]
