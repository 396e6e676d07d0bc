"""Seconds of a sync of an 8B shape by part, to one engine and to several, as every step of a run makes it.

    python -m benchmarks.sync_parts --out FOLDER --gpus 4 --models qwen3-8b --precisions fp8 bf16
    python -m benchmarks.sync_parts --out FOLDER --gpus 4 --engines 1 --models qwen3-8b --precisions fp8
    python -m benchmarks.sync_parts --out FOLDER --gpus 2 --tiny                         a rehearsal on a CPU

The settings are those of `benchmarks.grpo_8gpu`. No step is made: the same policy is sent again and again, and each
time it is quantised, written, read back, compared, and asked for known tokens. The first is not counted. A row of kind
`sync` has the median of the others, and the parts of that one: `probe` (the trainer scores known tokens), `sleep` (the
engine gives memory back), `export` (codes, gathered from the ranks), `update` (the engine wakes, takes and reads back),
`describe`, and `score` (the engine scores the tokens).

Predicted for Qwen3-8B in FP8 on four H100s, whose steps had 1.1 s of it: probe 0.15 s, export 0.15, update 0.65, score
0.1, the rest 0.05. In BF16: export 0.1, update 0.75.
"""

import argparse
import io
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.asynchronous_hopper import MODES
from benchmarks.grpo_8gpu import options_of, prepared
from benchmarks.harness import MODELS, Row, provenance, table, write_rows
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.loop import begin
from fp8core.run.open import open_directory, open_run
from fp8core.run.policy import push
from fp8core.run.scales import read_scales
from fp8core.store.ledger import START

RESULT = "sync_parts"
REPEATS = 7
PARTS = {"logprobs": "probe", "score": "score", **{name: name for name in ("sleep", "export", "update", "describe")}}
"""Methods of trainer and engine, by the name of their part."""


class Timed:
    """A trainer or an engine whose calls are timed."""

    def __init__(self, inner: Any, seconds: dict[str, float]) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in PARTS:
            return found

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*arguments)
            finally:
                self._seconds[PARTS[name]] += time.perf_counter() - began

        return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, row after row; returns 0."""
    options = options_of(arguments)
    if options.mode != MODES[0]:
        raise SystemExit(f"--mode {options.mode}: a sync is measured with {MODES[0]} steps")
    rows = list[Row]()
    for model in options.models:
        for precision in options.precisions:
            rows.append(measured(model, precision, options))
            write_rows(options.out / f"{RESULT}.json", rows)
    print(sync_table(rows), flush=True)
    return 0


def measured(model: str, precision: str, options: argparse.Namespace) -> Row:
    """The row of a model in a precision."""
    training, arch = prepared(model, precision, options)
    config = load_config(training.config, [*training.settings, f"runs={training.folder.parent}"])
    seconds: dict[str, float] = defaultdict(float)
    found = list[dict[str, float]]()
    with (
        open_directory(config, f"sync-{training.folder.name}") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        begin(run)
        engine, trainer = run.ready_engine(), run.ready_trainer()
        run.engine, run.trainer = Timed(engine, seconds), Timed(trainer, seconds)  # type: ignore[assignment]
        scales = read_scales(run, directory.ledger.tasks(START)["calibrate"].outputs["scales"])
        for _ in range(1 + REPEATS):
            seconds.clear()
            began = time.perf_counter()
            report = push(run, scales)
            found.append({**seconds, "whole": time.perf_counter() - began})
        run.engine, run.trainer = engine, trainer
    found = sorted(found[1:], key=lambda each: each["whole"])
    middle = found[len(found) // 2]
    return {
        "kind": "sync",
        "model": f"rehearsal of {model}" if options.tiny else model,
        "precision": precision,
        "layers": arch.num_layers,
        "gpus": options.gpus,
        "replicas": options.engines or options.gpus,
        "placement": config.cluster.placement,
        "seconds": middle["whole"],
        "parts": {name: each for name, each in middle.items() if name != "whole"},
        "all": [each["whole"] for each in found],
        "probe_differing": report["probe"]["differing"],
        **provenance(),
    }


def sync_table(rows: Sequence[Row]) -> str:
    """One line a row."""
    names = list(dict.fromkeys(PARTS.values()))
    return table(
        ("model", "precision", "GPUs", "engines", "placement", "ms", *(f"{name}, ms" for name in names), "differ"),
        (
            (
                f"{MODELS.get(row['model'], row['model'])}, {row['layers']} layers",
                *(row["precision"], str(row["gpus"]), str(row["replicas"]), row["placement"]),
                f"{1000 * row['seconds']:,.0f}",
                *(f"{1000 * row['parts'].get(name, 0.0):,.0f}" for name in names),
                str(row["probe_differing"]),
            )
            for row in rows
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
