"""The plan of a parity run: its trainings, checked before any work, without Prefect."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from flows.launch import refuse_silent_store, say
from fp8core.config.load import NON_NUMERIC_KEYS, Overrides, load_config, merged_overrides
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError
from fp8core.parity.measure import VARIANTS, variant_settings
from fp8core.parity.verdict import ParityResult, ParityVerdict
from fp8core.progress import Part
from fp8core.rollout.registry import engine_entry
from fp8core.run.build import members_node
from fp8core.run.open import check_inputs, refuse_unrunnable_settings
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import current_code, git_state, hardware, library_versions
from fp8core.store.run_directory import read_description
from fp8core.store.run_view import RunView

PARITY_DIR = "parity"
"""Folder beside the runs, with a folder for each parity run."""
_DIGITS = 8
VariantName = Literal[
    "bf16",
    "fp8-rollout",
    "fp8-rollout-corrected",
    "fp8-rollout-kv",
    "fp8-rollout-kv-corrected",
    "fp8-end-to-end",
    "fp8-end-to-end-kv",
    "stress",
    "asynchronous",
]
USUAL_VARIANTS: tuple[VariantName, ...] = (
    "bf16",
    "fp8-rollout",
    "fp8-rollout-corrected",
    "fp8-end-to-end",
    "fp8-end-to-end-kv",
    "stress",
)
"""Those that are trained where none is named."""


@dataclass(frozen=True)
class ParityRequest:
    config: str = "tiny-nightly"
    name: str | None = None
    seeds: Sequence[int] | None = None
    steps: int | None = None
    variants: Sequence[str] = USUAL_VARIANTS
    overrides: Overrides | None = None


@dataclass(frozen=True)
class Training:
    variant: str
    seed: int
    config: RunConfig
    parameters: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.config.runs.absolute() / str(self.config.run)


@dataclass(frozen=True)
class ParityPlan:
    """Everything a parity run does. Seeds come one after another, so that each shares one warm start."""

    name: str
    config: RunConfig
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    trainings: tuple[Training, ...]

    @property
    def folder(self) -> Path:
        return self.config.runs.absolute() / PARITY_DIR / self.name

    @property
    def platform(self) -> str:
        return members_node(self.config).platform if engine_entry(self.config).gpus(self.config) else "cpu"


def refuse(asked: ParityRequest, date: str) -> ParityPlan:
    """The plan, checked. `date` goes into the name of a parity run that has none.

    Raises UserError: something is named twice, or a training that is not finished cannot run.
    """
    for what, values in (("seeds", asked.seeds or ()), ("variants", asked.variants)):
        if len({*values}) != len(values):
            raise UserError(f"{what}: one is named twice in {', '.join(map(str, values))}")
    steps = {} if asked.steps is None else {"steps": asked.steps}
    overrides = merged_overrides(asked.overrides or {}, steps)
    config = load_config(asked.config, overrides)
    # In the order of VARIANTS: the baseline is there when a parity run is cut short.
    variants = tuple(name for name in VARIANTS if name in asked.variants)
    name = asked.name or f"{config.name}-{date}-{_digest(config)}"
    seeds = tuple(range(config.parity.seeds)) if asked.seeds is None else tuple(asked.seeds)
    trainings = tuple(
        _training(asked.config, overrides, config, name, variant, seed) for seed in seeds for variant in variants
    )
    left = [training.config for training in trainings if committed(training.folder) != training.config.steps]
    for unfinished in left:
        refuse_unrunnable_settings(unfinished)
    # A variant has another precision, not another model, data, verifier or store. The last one is the last to begin.
    for unfinished in left[-1:]:
        with Part("checking model and data", say):
            check_inputs(unfinished)
        refuse_silent_store(unfinished)
    return ParityPlan(name, config, variants, seeds, trainings)


def _training(named: str, overrides: Overrides, config: RunConfig, name: str, variant: str, seed: int) -> Training:
    run = f"parity-{name}-{variant}-{seed}"
    settings = merged_overrides(overrides, {**variant_settings(VARIANTS[variant], config, seed), "run": run})
    own = load_config(named, settings)
    return Training(variant, seed, own, {"config": named, "run": run, "overrides": settings})


def _digest(config: RunConfig) -> str:
    """Of everything that affects numbers: another setting or other code is another parity run."""
    settings = {
        key: value for key, value in public_dump(config).items() if key not in NON_NUMERIC_KEYS or key == "steps"
    }
    parts = {"settings": settings, "code": current_code(), "versions": library_versions()}
    return hashlib.sha256(canonical_json(parts, "parity")).hexdigest()[:_DIGITS]


def committed(folder: Path) -> int | None:
    if read_description(folder) is None:
        return None
    steps = RunView.read(folder).steps
    return max(steps) if steps else None


def record_of(plan: ParityPlan, verdict: ParityVerdict) -> ParityResult:
    return ParityResult(
        name=plan.name,
        config=plan.config.name,
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        outcome=verdict.outcome,
        headline=verdict.headline,
        variants=plan.variants,
        seeds=plan.seeds,
        code_version=current_code(),
        git=git_state(Path(__file__).parent),
        versions=library_versions(),
        hardware=hardware(),
        settings=public_dump(plan.config),
        checks=verdict.checks,
    )
