"""Faults that are injected into a run, and the bound that ends it: each within two steps, by the defaults alone.

The list is also a script, which prints the table of docs/results/faults.md. With a configuration for a GPU, all
faults that any engine can have go into one run after another:

    python tests/faults/test_faults.py
    python tests/faults/test_faults.py h200-small --set warm_start.steps=400
"""

import argparse
import io
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flows.environment import set_engine_variables
from fp8core.config.load import load_config
from fp8core.models.experts import TopKRouting, top_k
from fp8core.models.weights import Formats, rollout_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.logprobs import Bf16Head
from fp8core.report.console import Console
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Completion, PolicyScales, SyncReport
from fp8core.run.build import build_trainer
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.loop import BoundError, begin, iterate, next_step, watch
from fp8core.run.open import open_directory, open_run
from fp8core.run.policy import SyncError, push
from fp8core.run.scales import read_scales

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


class StalePrefixEngine(EmbeddedEngine):
    """Keeps the KV cache of prompts from the policy before."""

    _before: Any = None

    def update(self, tensors: Mapping[str, Tensor], scales: PolicyScales, version: int) -> SyncReport:
        self._before = self._weights
        return super().update(tensors, scales, version)

    def _prefill(self, *arguments: Any) -> Any:
        current = self._weights
        try:
            self._weights = self._before or current
            return super()._prefill(*arguments)
        finally:
            self._weights = current


class OffByOneRouting(TopKRouting):
    """Sends every token to the experts after those that the router chose."""

    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        return ((top_k(logits, k) + 1) % logits.shape[1]).sort(dim=-1).values


class MisroutingEngine(EmbeddedEngine):
    """An embedded engine whose router is off by one."""

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: Any, record: Any) -> Tensor:
        return super()._hidden(tokens, positions, cache, record or OffByOneRouting())


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
    return replace(batch, completion=batch.completion.roll(-1, dims=1) & batch.valid)


def step_with(change: Callable[[RolloutBatch], RolloutBatch]) -> Callable[..., Any]:
    return lambda part, batch, *others: part.step(change(batch), *others)


def replace_engine(run: RunContext, kind: type[EmbeddedEngine], formats: Formats | None = None) -> None:
    chosen = formats or rollout_formats(run.config.precision, run.arch.num_layers)
    engine = kind(run.arch, chosen, run.config.rollout.max_batch)
    run.engine = engine


def bf16_head(run: RunContext) -> None:
    agreed = rollout_formats(run.config.precision, run.arch.num_layers)
    replace_engine(run, EmbeddedEngine, replace(agreed, head=Bf16Head()))
    lying = Wrapper(run.engine)
    lying.describe = lambda: {**lying._part.describe(), "head": "fp32"}
    run.engine = lying


def cached_logprobs(run: RunContext) -> None:
    """The pass that scores rollouts keeps the weights of the policy that it has first seen."""
    before = build_trainer(run.config, run.arch, run.initial_policy())
    run.trainer = FaultyTrainer(run.trainer, logprobs=lambda part, *arguments: before.logprobs(*arguments))


def engine_with(kind: Callable[..., Any], *arguments: Any) -> Callable[[RunContext], None]:
    return lambda run: setattr(run, "engine", kind(run.engine, *arguments))


def trainer_with(**calls: Callable[..., Any]) -> Callable[[RunContext], None]:
    return lambda run: setattr(run, "trainer", FaultyTrainer(run.trainer, **calls))


def hot_scores(part: Any, batch: Any, temperature: float, *others: Any) -> Any:
    return part.logprobs(batch, 1.1 * temperature, *others)


def hot_step(part: Any, batch: Any, temperature: float, *others: Any) -> Any:
    return part.step(batch, 1.1 * temperature, *others)


def turned(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, advantages=-batch.advantages)


def mask_shifted(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, mask=batch.mask.roll(1, dims=1))


def unwritten_first(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, sequences=with_written_shifted(batch.sequences))


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong, in words.
        bound: the setting below `alignment.stop` that must end the run.
        inject: puts the fault into a run that has begun.
        embedded: whether it needs the embedded engine.
        config: shipped configuration on a CPU.
    """

    name: str
    bound: str
    inject: Callable[[RunContext], None]
    embedded: bool = False
    config: str = "tiny"


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
    Fault("the engine's head computes in BF16", "probe_differing", bf16_head, embedded=True),
    Fault(
        "the engine's router is off by one",
        "probe_differing",
        lambda run: replace_engine(run, MisroutingEngine),
        embedded=True,
        config="tiny-moe",
    ),
    Fault(
        "prompts are read from the KV cache of the policy before",
        "probe_differing",
        lambda run: replace_engine(run, StalePrefixEngine),
        embedded=True,
    ),
    Fault("completions are decoded and encoded again", "error", engine_with(ReencodingEngine)),
    Fault("old log-probs come from the first policy", "probe_differing", cached_logprobs),
)


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended: the bound that is named first and the step, or None twice."""

    bound: str | None
    step: int | None
    message: str


def run_with(faults: Sequence[Fault], config: str, overrides: Any, name: str = "faulty") -> list[Outcome]:
    """Train with one fault after the other, each from the first rollout or the rollout after the last fault on."""
    asked = load_config(config, overrides)
    set_engine_variables(asked)
    with (
        open_directory(asked, name) as directory,
        open_run(asked, graph_of(asked), directory, Console(io.StringIO(), asked.steps)) as run,
    ):
        begin(run)
        found = []
        for fault in faults:
            engine, trainer = run.engine, run.trainer
            found.append(outcome_of(run, fault))
            run.engine, run.trainer = engine, trainer
            if fault is not faults[-1]:
                heal(run)
        return found


def heal(run: RunContext) -> None:
    """The engine gets what it should hold: by the rest of the step that was cut, or by another sync."""
    index = next_step(run)
    if run.ready_trainer().version == index:
        iterate(run, index, carried(run, index))
    else:
        push(run, read_scales(run, carried(run, index)["scales"]))


def outcome_of(run: RunContext, fault: Fault) -> Outcome:
    first = next_step(run)
    fault.inject(run)
    try:
        if fault.embedded:
            push(run, read_scales(run, carried(run, first)["scales"]))
        for index in range(first, first + STEPS):
            iterate(run, index, carried(run, index))
            watch(run)
    except (SyncError, BoundError) as error:
        bound = re.search(r"alignment\.stop\.(\w+)=", str(error))
        done = next_step(run) - first
        return Outcome(bound[1] if bound else None, done if isinstance(error, BoundError) else done + 1, str(error))
    return Outcome(None, None, "the run went on")


def table(outcomes: Sequence[tuple[Fault, Outcome]]) -> str:
    """The rows as Markdown."""
    rows = [f"| {fault.name} | `{outcome.bound}` | {outcome.step} |" for fault, outcome in outcomes]
    return "\n".join(["| fault | bound that ends the run | in step |", "| --- | --- | --- |", *rows])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of small runs that share a warm start."""
    return {**SMALL, "runs": str(tmp_path_factory.mktemp("faults"))}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_ends_the_run_by_the_bound_that_is_named(fault: Fault, small: dict[str, Any]) -> None:
    (found,) = run_with([fault], fault.config, small, f"fault-{FAULTS.index(fault)}")
    assert found.bound == fault.bound, found.message
    assert found.step is not None
    assert found.step <= STEPS


def test_without_a_fault_no_bound_is_crossed(small: dict[str, Any]) -> None:
    healthy = Fault("none", "none", lambda run: None)
    assert run_with([healthy], "tiny", small, "healthy")[0].bound is None


def test_the_page_has_every_fault_with_its_bound() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "faults.md").read_text().partition("## On a GPU")[0]
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| [12] \|$", page, re.MULTILINE)
    assert rows == [(fault.name, fault.bound) for fault in FAULTS]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a configuration for a GPU (default: tiny, made small)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.config is None:
            chosen = FAULTS
            outcomes = [run_with([f], f.config, {**SMALL, "runs": f"{folder}/{i}"})[0] for i, f in enumerate(FAULTS)]
        else:
            chosen = tuple(fault for fault in FAULTS if not fault.embedded)
            outcomes = run_with(chosen, options.config, [f"runs={folder}", "steps=100", *options.set])
    print(table(list(zip(chosen, outcomes, strict=True))))
    for fault, found in zip(chosen, outcomes, strict=True):
        print(f"{fault.name}: {found.message}")
