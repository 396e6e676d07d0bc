"""Faults that are injected into a run, and the bound that ends it: each within two steps, by the defaults alone."""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.config.load import load_config
from fp8core.numerics.fingerprint import policy_digest
from fp8core.report.console import Console
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales, SyncReport
from fp8core.run.build import build_trainer
from fp8core.run.context import RunContext
from fp8core.run.loop import IN_PROCESS, BoundError, begin, watch
from fp8core.run.open import open_directory, open_run
from fp8core.run.policy import SyncError
from fp8core.run.refusals import graph_of

STEPS = 2


SMALL: dict[str, Any] = {
    "steps": STEPS,
    "warm_start": {"steps": 3, "batch_size": 16},
    "data": {"chain": {"min_operands": 3}},
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "evaluation": {"prompts": 8, "every": 2},
    "reward": {"verifier": f"{Path(__file__).parents[2] / 'benchmarks' / 'random_reward.py'}:score"},
    # Updates that move weights by more than FP8 rounds away.
    "training": {"learning_rate": 0.05, "warmup_steps": 0},
}


class Wrapper:
    """A part of the run that does everything as the part it holds, but for what a fault changes."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class LyingEngine(Wrapper):
    """Holds something else than it was sent, and reads back what it was sent."""

    def __init__(self, part: Any, change: Callable[..., tuple[Mapping[str, Tensor], PolicyScales]]) -> None:
        super().__init__(part)
        self._change, self._first = change, dict[str, Any]()

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        if not self._first:
            self._first = {"tensors": {name: tensor.clone() for name, tensor in tensors.items()}, "scales": scales}
        held, applied = self._change(self._first, tensors, scales)
        self._part.update(held, replace(applied, version=version), version)
        return SyncReport(version, policy_digest(tensors), scales)


def stale_scales(first: dict[str, Any], tensors: Any, scales: PolicyScales) -> Any:
    return tensors, first["scales"]


def divided_scales(first: dict[str, Any], tensors: Any, scales: PolicyScales) -> Any:
    *others, last = scales.layers
    return tensors, replace(scales, layers=(*others, replace(last, v=last.v / 16)))


def doubled_tile(first: dict[str, Any], tensors: Any, scales: PolicyScales) -> Any:
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale_inv"))
    changed = tensors[name].clone()
    changed[0, 0] *= 2
    return {**tensors, name: changed}, scales


def stale_weights(first: dict[str, Any], tensors: Any, scales: PolicyScales) -> Any:
    return first["tensors"], scales


class HotEngine(Wrapper):
    """Samples at 1.1 times the temperature that it was asked for."""

    def generate(self, groups: Any, sampling: Any) -> Any:
        return self._part.generate(groups, replace(sampling, temperature=1.1 * sampling.temperature))

    def score(self, probes: Any, temperature: float) -> Any:
        return self._part.score(probes, 1.1 * temperature)


class ReencodingEngine(Wrapper):
    """Its completions were decoded to text and encoded again, which cut the first two tokens another way."""

    def generate(self, groups: Any, sampling: Any) -> Any:
        for finished in self._part.generate(groups, sampling):
            yield [self._again(done) for done in finished]

    def _again(self, done: Completion) -> Completion:
        return replace(done, tokens=[*reversed(done.tokens[:2]), *done.tokens[2:]])


class FaultyTrainer(Wrapper):
    """A trainer one of whose calls gets other arguments, or gives something else."""

    def __init__(self, part: Any, **calls: Callable[..., Any]) -> None:
        super().__init__(part)
        for name, call in calls.items():
            setattr(self, name, lambda *arguments, _call=call, **named: _call(part, *arguments, **named))


def shifted(scored: Any) -> Any:
    """Every log-prob belongs to the token before."""
    values = torch.where(scored.logprobs.isnan(), scored.logprobs, scored.logprobs.nan_to_num().roll(1, dims=1))
    return replace(scored, logprobs=values)


def with_written_shifted(batch: TokenBatch) -> TokenBatch:
    """The last prompt token counts as written, and the last written one does not."""
    return replace(batch, response_mask=batch.response_mask.roll(-1, dims=1) & batch.valid)


def step_with(change: Callable[[RolloutBatch], RolloutBatch]) -> Callable[..., Any]:
    return lambda part, batch, *others: part.step(change(batch), *others)


def cached_logprobs(run: RunContext) -> None:
    """The pass that scores rollouts keeps the weights of the policy that it has first seen."""
    before = build_trainer(run.config, run.arch, run.initial_policy())
    run.workers.trainer = FaultyTrainer(run.trainer, logprobs=lambda part, *arguments: before.logprobs(*arguments))


def engine_with(kind: Callable[..., Any], *arguments: Any) -> Callable[[RunContext], None]:
    return lambda run: setattr(run.workers, "engine", kind(run.engine, *arguments))


def trainer_with(**calls: Callable[..., Any]) -> Callable[[RunContext], None]:
    return lambda run: setattr(run.workers, "trainer", FaultyTrainer(run.trainer, **calls))


def hot_scores(part: Any, batch: Any, temperature: float, *others: Any) -> Any:
    return part.logprobs(batch, 1.1 * temperature, *others)


def hot_step(part: Any, batch: Any, temperature: float, *others: Any) -> Any:
    return part.step(batch, 1.1 * temperature, *others)


def turned(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, advantages=-batch.advantages)


def mask_shifted(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, policy_mask=batch.policy_mask.roll(1, dims=1))


def unwritten_first(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, sequences=with_written_shifted(batch.sequences))


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong, in words.
        bound: the setting below `alignment.stop` that must end the run.
        inject: puts the fault into a run that has begun.
    """

    name: str
    bound: str
    inject: Callable[[RunContext], None]


FAULTS = (
    Fault(
        "the engine applies the scales of the first policy", "probe_differing", engine_with(LyingEngine, stale_scales)
    ),
    Fault("one scale of V is divided by 16 in the engine", "probe_differing", engine_with(LyingEngine, divided_scales)),
    Fault("one weight tile is doubled in the engine", "probe_differing", engine_with(LyingEngine, doubled_tile)),
    Fault(
        "the engine keeps the weights of an older version", "probe_differing", engine_with(LyingEngine, stale_weights)
    ),
    Fault("the rollout samples at 1.1 times the temperature", "probe_differing", engine_with(HotEngine)),
    Fault("log-probs are taken at 1.1 times the temperature", "probe_differing", trainer_with(logprobs=hot_scores)),
    Fault("the loss takes 1.1 times the temperature", "ratio_bias", trainer_with(step=hot_step)),
    Fault(
        "log-probs belong to the token before", "error", trainer_with(logprobs=lambda p, *a: shifted(p.logprobs(*a)))
    ),
    Fault("the loss mask is shifted by one token", "mask_differing", trainer_with(step=step_with(mask_shifted))),
    Fault("training scores the tokens before", "ratio_bias", trainer_with(step=step_with(unwritten_first))),
    Fault("advantages have the wrong sign", "reward_slope", trainer_with(step=step_with(turned))),
    Fault("completions are decoded and encoded again", "error", engine_with(ReencodingEngine)),
    Fault("old log-probs come from the first policy", "probe_differing", cached_logprobs),
)


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended: the bound that is named first, or None."""

    bound: str | None
    message: str


def outcome_of(fault: Fault, settings: dict[str, Any], name: str) -> Outcome:
    config = load_config("tiny", settings)
    with (
        open_directory(config, name) as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), STEPS)) as run,
    ):
        begin(run)
        fault.inject(run)
        try:
            for index in range(1, STEPS + 1):
                IN_PROCESS.iterate(run, index)
                watch(run)
        except (SyncError, BoundError) as error:
            bound = re.search(r"alignment\.stop\.(\w+)=", str(error))
            return Outcome(bound[1] if bound else None, str(error))
    return Outcome(None, "the run went on")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of small runs that share a warm start."""
    return {**SMALL, "runs": str(tmp_path_factory.mktemp("faults"))}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_ends_the_run_by_the_bound_that_is_named(fault: Fault, small: dict[str, Any]) -> None:
    found = outcome_of(fault, small, f"fault-{FAULTS.index(fault)}")
    assert found.bound == fault.bound, found.message


def test_without_a_fault_no_bound_is_crossed(small: dict[str, Any]) -> None:
    assert outcome_of(Fault("none", "none", lambda run: None), small, "healthy").bound is None
