"""The plan of a parity run: its trainings, checked before any work, without Prefect."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.launch import check_trackers, say
from fp8core.config.load import NON_NUMERIC_KEYS, Overrides, load_config, merged_overrides
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError
from fp8core.parity import VARIANTS, Check, headline_of, outcome_of, variant_settings
from fp8core.progress import Part
from fp8core.run.open import check_inputs, check_settings
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import current_code, library_versions
from fp8core.store.run_directory import read_description
from fp8core.store.run_view import RunView

PARITY_DIR = "parity"
"""Folder beside the runs, with a folder for each parity run."""
_DIGITS = 8


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


def refuse(
    config: str,
    date: str,
    *,
    name: str | None = None,
    seeds: Sequence[int] | None = None,
    variants: Sequence[str] | None = None,
    overrides: Overrides | None = None,
) -> ParityPlan:
    """The plan, checked. `date` goes into the name of a parity run that has none.

    Raises UserError: a variant is unknown, or a training that is not finished cannot run.
    """
    for variant in variants or ():
        if variant not in VARIANTS:
            raise UserError(f"variants: {variant} is none of {', '.join(VARIANTS)}")
    base = load_config(config, overrides or {})
    # In the order of VARIANTS: the baseline is there when a parity run is cut short.
    variant_names = tuple(each for each in VARIANTS if variants is None or each in variants)
    seed_numbers = tuple(range(base.parity.seeds) if seeds is None else dict.fromkeys(seeds))
    full_name = name or f"{base.name}-{date}-{_digest(base)}"
    trainings = tuple(
        _training(config, overrides or {}, base, full_name, variant, seed)
        for seed in seed_numbers
        for variant in variant_names
    )
    open_configs = [
        training.config for training in trainings if last_committed_step(training.folder) != training.config.steps
    ]
    for open_config in open_configs:
        check_settings(open_config)
    # A variant has another precision, not another model, data, verifier or store. The last one is the last to begin.
    for open_config in open_configs[-1:]:
        with Part("checking model and data", say):
            check_inputs(open_config)
        check_trackers(open_config)
    return ParityPlan(full_name, base, variant_names, seed_numbers, trainings)


def _training(
    config_name: str, overrides: Overrides, config: RunConfig, name: str, variant: str, seed: int
) -> Training:
    run = f"parity-{name}-{variant}-{seed}"
    settings = merged_overrides(overrides, {**variant_settings(VARIANTS[variant], config, seed), "run": run})
    own = load_config(config_name, settings)
    return Training(variant, seed, own, {"config": config_name, "run": run, "overrides": settings})


def _digest(config: RunConfig) -> str:
    """Of everything that affects numbers: another setting or other code is another parity run."""
    settings = {
        key: value for key, value in public_dump(config).items() if key not in NON_NUMERIC_KEYS or key == "steps"
    }
    parts = {"settings": settings, "code": current_code(), "versions": library_versions()}
    return hashlib.sha256(canonical_json(parts, "parity")).hexdigest()[:_DIGITS]


def last_committed_step(folder: Path) -> int | None:
    if read_description(folder) is None:
        return None
    steps = RunView.read(folder).steps
    return max(steps) if steps else None


def record_of(plan: ParityPlan, checks: Sequence[Check]) -> dict[str, Any]:
    """The content of verdict.json. `settings` are those of the configuration, before a variant changes them."""
    return {
        "name": plan.name,
        "config": plan.config.name,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "outcome": outcome_of(checks),
        "headline": headline_of(checks),
        "variants": plan.variants,
        "seeds": plan.seeds,
        "code_version": current_code(),
        "settings": public_dump(plan.config),
        "checks": [check._asdict() for check in checks],
    }
