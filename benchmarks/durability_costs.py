"""Costs of durability: writing the files of a step, parquet of long rollouts, opening a long run again.

    python -m benchmarks.durability_costs

Writes benchmarks/results/durability_costs.json and prints a table of docs/results/service.md. Run it on an idle
machine with the runs on a local disk; it takes some five minutes on two cores.

- `writing`: the 80 iterations of `tiny`, without Prefect and MLflow. Counted is every put of an artifact (encoding,
  SHA-256, fsync), and all that an iteration does outside its tasks (keys, ledger, manifest, removal of shards). Counted
  too are the shards, which are written once more afterwards, from the stored rollouts in their original portions.
- `parquet`: one table of 512 completions of 4,096 tokens with log-probs and text, through `ArtifactStore.put_table`.
  Tokens follow Zipf's law over a vocabulary as large as Qwen's, of words of one to eight letters; log-probs are noise,
  which nothing compresses.
- `resume`: a run of 1,000 real steps, with one prompt, two completions of two tokens and one layer, and its first 10
  steps for comparison. Its ledger, manifests and artifacts are as many as in any run. The time ends when the first task
  of the next step may begin in a new process. It excludes imports, Prefect and MLflow. Nothing is redone, as the last
  step has a checkpoint.

Predicted before the first measurement: writing takes 3 % of an iteration (30 of 1,000 ms), parquet 0.15 s and 8.5 of
12.6 bytes a token. Resuming takes 0.4 s whatever the number of steps, with 5 ms for the ledger (whole: 200 ms).
"""

import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.harness import RESULTS, Row, provenance, table, write_rows
from fp8core.config.load import load_config
from fp8core.config.run import RunConfig, public_dump
from fp8core.report.console import Console
from fp8core.run.checkpoint import checkpoint_due, save_state
from fp8core.run.context import RunContext
from fp8core.run.execute import carried_artifacts
from fp8core.run.loop import IN_PROCESS, begin, next_step, train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.artifacts import ArtifactStore, Ref, RolloutShards
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import Ledger, LedgerView
from fp8core.store.lock import RunLock
from fp8core.store.manifest import current_code
from fp8core.store.run_directory import RunDirectory
from fp8core.store.tables import ROLLOUTS

BOUNDS = {"share": 0.05, "parquet_seconds": 0.5, "resume_seconds": 2.0}
LONG, SHORT = 1000, 10
VOCABULARY = 151_936
MINIMAL = {
    "architecture.num_layers": 1,
    "warm_start.steps": 1,
    "warm_start.batch_size": 2,
    "rollout.prompts_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 2,
    "evaluation.prompts": 1,
    "evaluation.every": LONG,
    "checkpoint.every": LONG,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        rows = [
            parquet(runs, rows=512, length=4096, times=5) | {"bound_seconds": BOUNDS["parquet_seconds"]},
            writing(load_config("tiny", {"runs": runs, "run": "writing"})) | {"bound_share": BOUNDS["share"]},
            *resume({**MINIMAL, "runs": runs}, SHORT, LONG),
        ]
    rows = [row | provenance() for row in rows]
    write_rows(RESULTS / "durability_costs.json", rows)
    print(costs_table(rows))


# --- writing ---


class TimedStore(ArtifactStore):
    """Adds up how long puts took, by kind."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seconds: dict[str, float] = defaultdict(float)

    def put_table(self, kind: str, table: pa.Table) -> Ref:
        with self._timed(kind):
            return super().put_table(kind, table)

    def put_tensors(self, kind: str, *arguments: Any) -> Ref:
        with self._timed(kind):
            return super().put_tensors(kind, *arguments)

    def put_json(self, kind: str, value: Any) -> Ref:
        with self._timed(kind):
            return super().put_json(kind, value)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - began


class TimedDirectory(RunDirectory):
    """A run's folder with a timed store."""

    def __init__(self, path: Path, store: ArtifactStore, lock: RunLock, ledger: Ledger, origin: Path | None) -> None:
        super().__init__(path, store, lock, ledger, origin)
        self.timed = self.store = TimedStore(path)


def writing(config: RunConfig) -> dict[str, Any]:
    """Seconds of all iterations of a run, and those spent on files."""
    assert config.run is not None
    began = time.perf_counter()
    with TimedDirectory.create_or_open(config.runs / config.run) as directory:
        directory.write_description(public_dump(config), current_code())
        with open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run:
            begin(run)
            directory.timed.seconds.clear()
            outside, iterations, checkpoints = 0.0, 0.0, 0.0
            for index in range(1, config.steps + 1):
                wall, tasks = iteration_seconds(run, index)
                iterations, outside = iterations + wall, outside + wall - tasks
                checkpoints += checkpoint_seconds(run, index)
            whole = time.perf_counter() - began
            # The manifest's put is outside the tasks already.
            puts = sum(seconds for kind, seconds in directory.timed.seconds.items() if kind != "manifest")
            shards = sum(shard_seconds(run, index) for index in range(1, config.steps + 1))
    files = puts + outside + shards
    return {
        "kind": "writing",
        "steps": config.steps,
        "seconds": {"run": whole, "iterations": iterations, "checkpoints": checkpoints},
        "file_seconds": {"artifacts": puts, "ledger_manifest_and_keys": outside, "shards": shards},
        "milliseconds_per_step": 1000 * files / config.steps,
        "share_of_iterations": files / iterations,
        "share_of_run": files / whole,
    }


def iteration_seconds(run: RunContext, index: int) -> tuple[float, float]:
    """Seconds of an iteration, and of the bodies of its tasks."""
    began = time.perf_counter()
    results = IN_PROCESS.iterate(run, index)
    return time.perf_counter() - began, sum(result.entry.seconds for result in results.values())


def checkpoint_seconds(run: RunContext, index: int) -> float:
    """Seconds of a step's checkpoint; 0 when none was due."""
    began = time.perf_counter()
    if checkpoint_due(run, index):
        save_state(run, index)
    return time.perf_counter() - began


def shard_seconds(run: RunContext, index: int) -> float:
    """Seconds of a step's shards: groups whose longest completions are equally long were written together."""
    rollouts = run.store.get_table(run.directory.ledger.artifacts(index)["rollouts"])
    rows = rollouts.to_pylist()
    longest: dict[int, int] = defaultdict(int)
    for row in rows:
        longest[row["group"]] = max(longest[row["group"]], len(row["tokens"]))
    portions = [
        pa.Table.from_pylist([row for row in rows if longest[row["group"]] == length], schema=rollouts.schema)
        for length in sorted(set(longest.values()))
    ]
    shards = RolloutShards(run.directory.path / "shards" / "again")
    began = time.perf_counter()
    for portion in portions:
        shards.append(portion)
    seconds = time.perf_counter() - began
    shards.clear()
    return seconds


# --- parquet ---


def parquet(folder: Path, rows: int, length: int, times: int) -> dict[str, Any]:
    """Seconds to store a table of long rollouts (median and worst of several), and bytes a token raw and stored."""
    seconds = []
    for seed in range(times):
        rollouts = long_rollouts(rows, length, seed)
        store = ArtifactStore(folder / f"parquet{seed}")
        began = time.perf_counter()
        ref = store.put_table("rollouts", rollouts)
        seconds.append(time.perf_counter() - began)
    stored: dict[str, float] = defaultdict(float)
    group = pq.ParquetFile(store.path(ref)).metadata.row_group(0)
    for i in range(group.num_columns):
        column = group.column(i)
        stored[column.path_in_schema.partition(".")[0]] += column.total_compressed_size
    tokens = rows * length
    return {
        "kind": "parquet",
        "tokens": tokens,
        "seconds": {"median": median(seconds), "worst": max(seconds)},
        "bytes_per_token": {"raw": rollouts.nbytes / tokens, "stored": ref.size / tokens},
        "bytes_per_token_by_column": {
            name: {"raw": rollouts[name].nbytes / tokens, "stored": stored[name] / tokens}
            for name in ("tokens", "logprobs", "written", "text")
        },
    }


def long_rollouts(rows: int, length: int, seed: int) -> pa.Table:
    """A table of kind `rollouts` in groups of eight."""
    generator = np.random.default_rng(seed)
    frequencies = 1 / np.arange(1, VOCABULARY + 1)
    tokens = generator.choice(VOCABULARY, (rows, length), p=frequencies / frequencies.sum()).astype(np.int32)
    logprobs = -generator.exponential(0.5, (rows, length)).astype(np.float32)
    words = made_up_words(VOCABULARY, generator)
    return pa.table(
        {
            "group": np.arange(rows) // 8,
            "sample": np.arange(rows) % 8,
            "prompt_id": [f"train-{i // 8}" for i in range(rows)],
            "seed": generator.integers(0, 2**62, rows),
            "prompt_tokens": list(tokens[:, :128]),
            "tokens": list(tokens),
            "logprobs": list(logprobs),
            "written": [[True] * length] * rows,
            "finish": ["length"] * rows,
            "text": ["".join(words[token] for token in row) for row in tokens],
        },
        schema=ROLLOUTS,
    )


def made_up_words(count: int, generator: np.random.Generator) -> list[str]:
    """Words of one to eight letters."""
    ends = generator.integers(1, 9, count).cumsum()
    letters = "".join(generator.choice(list("abcdefghijklmnopqrstuvwxyz "), ends[-1]))
    return [letters[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


# --- resuming ---


def resume(settings: dict[str, Any], *lengths: int) -> list[Row]:
    """Costs of resuming one run, which is taken to each number of steps in turn."""
    rows = []
    for steps in lengths:
        config = load_config("tiny", {**settings, "run": "resume", "steps": steps})
        with opened(config) as run:
            train(run)
        cost = resumption(load_config("tiny", {**settings, "run": "resume", "steps": steps + 1}))
        rows.append({"kind": "resume", "steps": steps, "bound_seconds": BOUNDS["resume_seconds"], **cost})
    return rows


@contextmanager
def opened(config: RunConfig) -> Iterator[RunContext]:
    assert config.run is not None
    graph, console = graph_of(config), Console(io.StringIO(), config.steps)
    with open_directory(config, config.run) as directory, open_run(config, graph, directory, console) as run:
        yield run


def resumption(config: RunConfig) -> dict[str, Any]:
    """Seconds until the next step of a finished run may begin, its ledger's share, and how much there is to open."""
    assert config.run is not None
    ledger = config.runs / config.run / LEDGER
    began = time.perf_counter()
    with opened(config) as run:
        redone = begin(run)
        index = next_step(run)
        carried_artifacts(run, index)
        seconds = time.perf_counter() - began
    assert (redone, index) == (0, config.steps)
    return {
        "seconds": seconds,
        "ledger_seconds": {"whole": reading_seconds(LedgerView.read, ledger)},
        "ledger_lines": ledger.read_bytes().count(b"\n"),
        "artifacts": sum(1 for path in (ledger.parent / "artifacts").glob("*/*")),
    }


def reading_seconds(read: Any, ledger: Path) -> float:
    """Median of five."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        read(ledger)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


# --- the table ---


def costs_table(rows: Sequence[Row]) -> str:
    """Measurements beside their bounds."""
    (stored,), (written,), resumed = ([r for r in rows if r["kind"] == k] for k in ("parquet", "writing", "resume"))
    raw, kept, ledger = *stored["bytes_per_token"].values(), resumed[-1]["ledger_seconds"]
    share = f"{written['share_of_iterations']:.1%}"
    return table(
        ["what", "measured", "bound"],
        [
            ["files of an iteration, share of its time", share, f"{written['bound_share']:.0%}"],
            ["files of an iteration", f"{written['milliseconds_per_step']:.1f} ms", ""],
            ["512 x 4,096 tokens as parquet", f"{stored['seconds']['median']:.2f} s", f"{stored['bound_seconds']} s"],
            ["bytes a token, raw -> stored", f"{raw:.1f} -> {kept:.1f}", ""],
            *(
                [f"resume after {row['steps']} steps", f"{row['seconds']:.2f} s", f"{row['bound_seconds']} s"]
                for row in resumed
            ),
            ["of this, the ledger", f"{1000 * ledger['whole']:.0f} ms", ""],
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
