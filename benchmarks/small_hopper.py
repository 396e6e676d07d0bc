"""Train the variants of h200-small, from BF16 to FP8 everywhere, and collect their rows and curves.

    python benchmarks/small_hopper.py --out FOLDER --seconds 520                    the usual ones, one after another
    python benchmarks/small_hopper.py --out FOLDER --seconds 520 bf16 fp8_rollout   some of them

Every variant is a run of its own in FOLDER/runs, begun from one warm start that the first of them makes. When the time
is over the one that trains stops after its step, and the same command goes on from there: call it until it says that
all are done. A warm start that is cut begins anew: give the first call time for it.
FOLDER/small_hopper.json has the rows, FOLDER/small_hopper.png the curves, FOLDER/logs what each run said.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.small_rows import Row, alignment_row, draw_variants, step_ledger_row
from benchmarks.small_tables import tables
from benchmarks.trainings import run_until, training_command
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.parity.variants import VARIANTS, variant_settings
from fp8core.report.run_data import read_run
from fp8core.store.ledger import START
from fp8core.store.run_directory import LEDGER

NAMES = {
    "bf16": "bf16",
    "fp8_rollout": "fp8-rollout",
    "fp8_rollout_tis": "fp8-rollout-corrected",
    "fp8_end_to_end": "fp8-end-to-end",
    "fp8_end_to_end_kv": "fp8-end-to-end-kv",
    "fp8_end_to_end_kv_stock": "fp8-end-to-end-kv",
    "bf16_megatron": "bf16",
    "fp8_end_to_end_megatron": "fp8-end-to-end",
}
"""Variants of the rows, by the names that the parity flow has for them."""
# Repeatable attention of Megatron would hold all scores of a pack, and then nothing is repeated bit for bit.
_MEGATRON = {"training.trainer": "megatron", "training.deterministic": False, "replay.level": "tolerant"}
_CHANGED: Mapping[str, Mapping[str, Any]] = {
    "fp8_end_to_end_kv_stock": {"rollout.vllm.model": "stock"},
    "bf16_megatron": _MEGATRON,
    "fp8_end_to_end_megatron": _MEGATRON,
}
"""What more is unlike the configuration in variants that are trained when they are asked for: vLLM's own model, to show
what the aligned one changes, and Megatron beside torch."""
_USUAL = [name for name in NAMES if name not in _CHANGED]

RESULT = "small_hopper"
TERMINATED = 143
_SHOWN = 12_000


@dataclass(frozen=True)
class Training:
    """A variant, its folder, and the settings that make it of the configuration."""

    variant: str
    folder: Path
    config: str
    settings: tuple[str, ...]
    steps: int

    @property
    def command(self) -> list[str]:
        """What trains it, or goes on with it."""
        return training_command(self.config, [*self.settings, f"runs={self.folder.parent}", f"run={self.folder.name}"])

    @property
    def shown(self) -> str:
        """The same for readers, without the places of this machine."""
        return " ".join(["fp8-grpo run", self.config, *(f"--set {setting}" for setting in self.settings)])

    @property
    def done(self) -> bool:
        """Whether its last step is committed and its report is written."""
        summary = self.folder / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["steps"] == self.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is not done, then write rows and curves of all that there is; returns 0 when all is done, else 1."""
    options = _options(arguments)
    out = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    trainings = plan(options.config, options.overrides, options.variants or _USUAL, out / "runs")
    everything = plan(options.config, options.overrides, list(NAMES), out / "runs")
    failures: list[Row] = []
    for failure in _train(trainings, out / "logs", time.monotonic() + options.seconds, options.grace):
        failures += [] if failure is None else [failure]
        # After every variant: what was measured stays, whatever ends this process.
        _write(out, everything, failures)
    _show(out, everything, _write(out, everything, failures))
    left = [training.variant for training in trainings if not training.done]
    print(f"left: {', '.join(left)}" if left else "all are done", flush=True)
    return 1 if left else 0


def plan(config: str, overrides: Sequence[str], variants: Sequence[str], runs: Path) -> list[Training]:
    """The trainings of variants, in the order given. Raises UserError: the configuration is refused."""
    base = load_config(config, overrides)
    return [_training(base, config, overrides, variant, runs) for variant in variants]


def _training(base: RunConfig, config: str, overrides: Sequence[str], variant: str, runs: Path) -> Training:
    values = variant_settings(VARIANTS[NAMES[variant]], base, base.seed)
    values |= _CHANGED.get(variant, {})
    settings = (*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items()))
    return Training(variant, runs / f"{base.name}-{variant}", config, settings, base.steps)


def _train(trainings: Sequence[Training], logs: Path, deadline: float, grace: float) -> Iterator[Row | None]:
    """Train one after another until `deadline`; yields a row for each that failed, None for others."""
    for training in trainings:
        if training.done:
            print(f"{training.variant}: done before", flush=True)
            continue
        if time.monotonic() > deadline - 2 * grace:
            return
        began, log = time.monotonic(), logs / f"{training.variant}.log"
        with log.open("ab") as output:
            code = run_until(training.command, output, deadline - grace, deadline)
        print(f"{training.variant}: {_outcome(training, code)}, {time.monotonic() - began:.0f} s", flush=True)
        if not training.done and code != TERMINATED and time.monotonic() < deadline:
            said = log.read_text(errors="replace")[-_SHOWN:]
            print(said, flush=True)
            yield {"kind": "failure", "variant": training.variant, "code": code, "said": said}
        else:
            yield None


def _outcome(training: Training, code: int) -> str:
    if code == 0:
        return "done"
    return f"stopped after a step ({code})" if code == TERMINATED else f"ended with {code}"


def _write(out: Path, trainings: Sequence[Training], failures: Sequence[Row]) -> list[Row]:
    """The rows of all that there is."""
    rows: list[Row] = []
    for training in filter(_has_steps, trainings):
        run = read_run(training.folder, training.variant)
        rows.append(alignment_row(run, training.variant, training.shown))
        ledger = step_ledger_row(run, training.variant, training.shown)
        rows += [] if ledger is None else [ledger]
    content = {"command": " ".join(["python benchmarks/small_hopper.py", *sys.argv[1:]]), "rows": [*rows, *failures]}
    (out / f"{RESULT}.json").write_text(json.dumps(content, indent=1) + "\n")
    return rows


def _show(out: Path, trainings: Sequence[Training], rows: Sequence[Row]) -> None:
    """Curves and tables."""
    runs = {training.variant: read_run(training.folder, training.variant) for training in filter(_has_steps, trainings)}
    if runs:
        draw_variants(runs, out / f"{RESULT}.png", "One warm start, several precisions")
    print(*tables(rows), sep="\n\n", flush=True)


def _has_steps(training: Training) -> bool:
    """Whether an iteration is committed."""
    if not (training.folder / LEDGER).exists():
        return False
    return max(read_run(training.folder, training.variant).evidence.steps, default=START) > START


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the variants of h200-small; call it again until all are done.")
    parser.add_argument("variants", nargs="*", type=_variant, metavar="VARIANT", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results; the same for every call")
    parser.add_argument("--seconds", type=float, default=520.0, help="of this call (default 520)")
    parser.add_argument("--grace", type=float, default=45.0, help="of these, for a last step and its checkpoint")
    parser.add_argument("--config", default="h200-small", help="another configuration to make the variants of")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    return parser.parse_args(arguments)


def _variant(name: str) -> str:
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(NAMES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
