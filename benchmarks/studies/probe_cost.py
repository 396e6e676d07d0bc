"""Cost of the probe after every sync, beside a whole step (`tasks.sync`).

    python -m benchmarks.studies.probe_cost --out FOLDER tiny --set warm_start.steps=20
    python -m benchmarks.studies.probe_cost --out FOLDER --large fp8_end_to_end_kv       Qwen3-8B's shape, on one H200

Trains some steps, then syncs the same policy again and again and times the two passes of the probe in their places.
The trainer's comes before the engine wakes, the engine's after its weights are read back. FOLDER/probe_cost.json has
the rows.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import provenance, write_rows
from benchmarks.large_ledger import VARIANTS, architecture, make_model, training
from flows.environment import set_engine_variables
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.loop import begin, iterate, next_step
from fp8core.run.open import open_directory, open_run
from fp8core.run.policy import compare_probe, trainer_probe
from fp8core.run.scales import read_scales

RESULT = "probe_cost.json"
_SYNCS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one configuration and add its row."""
    options = _options(arguments)
    out = options.out.absolute()
    config = _large(options, out) if options.large else load_config(options.config, [*options.set, f"runs={out}/runs"])
    set_engine_variables(config)
    with (
        open_directory(config, f"probe-{config.name}") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        begin(run)
        steps = [_seconds_of_step(run) for _ in range(options.steps)]
        trainer, engine, found = _times(run)
    row = {
        "kind": "probe_cost",
        **provenance(),
        "config": options.large or config.name,
        "step_seconds": steps,
        "trainer_seconds": trainer,
        "engine_seconds": engine,
        "share_of_step": (median(trainer) + median(engine)) / min(steps),
        **found,
    }
    path = out / RESULT
    rows = json.loads(path.read_text()) if path.exists() else []
    write_rows(path, [*rows, row])
    print(json.dumps(row))
    return 0


def _large(options: argparse.Namespace, out: Path) -> RunConfig:
    """The configuration of the large ledger, with its random model."""
    arch = architecture(options.device, options.layers)
    model = out / f"model-{options.device}-{arch.num_layers}"
    make_model(model, arch, options.device)
    made = training(model, options.large, options)
    return load_config(made.config, [*made.settings, f"runs={out}/runs"])


def _seconds_of_step(run: RunContext) -> float:
    began, index = time.perf_counter(), next_step(run)
    iterate(run, index, carried(run, index))
    return time.perf_counter() - began


def _times(run: RunContext) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of the trainer's and of the engine's pass in some syncs of one policy, and the probe's result."""
    trainer, engine = run.ready_trainer(), run.ready_engine()
    scales, seconds = read_scales(run, carried(run, next_step(run))["scales"]), ([0.0] * 0, [0.0] * 0)
    for _ in range(_SYNCS + 1):
        engine.sleep()
        began = time.perf_counter()
        probes, expected = trainer_probe(run, scales)
        seconds[0].append(time.perf_counter() - began)
        engine.update(trainer.export(), scales, trainer.version)
        began = time.perf_counter()
        scored = engine.score(probes, run.config.rollout.temperature)
        seconds[1].append(time.perf_counter() - began)
    return seconds[0][1:], seconds[1][1:], compare_probe(expected, scored)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of the probe after a sync.")
    parser.add_argument("config", nargs="?", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--large", choices=VARIANTS, help="Qwen3-8B's shape with random weights instead")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
