"""What durability costs: writing the files of a step, parquet of long rollouts, opening a long run again.

    python benchmarks/durability_costs.py

Writes benchmarks/results/durability_costs.json and prints the table of docs/durability.md. Run it on an idle machine
with the runs on a local disk; it takes some five minutes on two cores.

- `writing`: the 80 iterations of `tiny`, without Prefect and MLflow. Counted are every put of an artifact (encoding,
  SHA-256, fsync), all that an iteration does outside its tasks (keys, ledger, manifest, removal of shards), and the
  shards, which are written once more afterwards, from the stored rollouts and in the portions in which they came.
- `parquet`: one table of 512 completions of 4,096 tokens with log-probs and text, through `ArtifactStore.put_table`.
  Tokens follow Zipf's law over a vocabulary as large as Qwen's, of words of one to eight letters; log-probs are noise,
  which nothing compresses.
- `resume`: a run of 1,000 steps that were really made, with one prompt, two completions of two tokens and one layer,
  so that its ledger, manifests and artifacts are as many as in any run; and its first 10 steps for comparison. Measured
  is what a new process does until the first task of the next step may begin: no imports, no Prefect, no MLflow, and
  nothing to redo, as the last step has a checkpoint.

Predicted before the first measurement: writing 3 % of an iteration (30 of 1,000 ms), parquet 0.15 s and 8.5 of 12.6
bytes a token, resuming 0.4 s whatever the number of steps, with 5 ms for the ledger (whole: 200 ms).
"""

import io
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig, public_dump
from fp8core.report.console import Console
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.ledger import Ledger, LedgerView
from fp8core.store.lock import RunLock
from fp8core.store.run_directory import LEDGER, RunDirectory
from fp8core.store.shards import RolloutShards
from fp8core.store.tables import ROLLOUTS
from fp8core.store.versions import git_state, hardware, library_versions
from fp8core.workers.live import LiveRun
from tasks.checkpoint import checkpoint_due, save_state
from tasks.loop import begin, iterate, next_step, train
from tasks.opening import current_code, open_directory, open_run, plan_of
from tasks.restore import carried

RESULTS = Path(__file__).parent / "results" / "durability_costs.json"
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
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": git_state(Path(__file__).parent),
            "versions": library_versions(),
            "hardware": hardware(),
            "bounds": BOUNDS,
            "parquet": parquet(runs, rows=512, length=4096, times=5),
            "writing": writing(load_config("tiny", {"runs": runs, "run": "writing"})),
            "resume": resume({**MINIMAL, "runs": runs}, SHORT, LONG),
        }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


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

    def __init__(self, path: Path, store: ArtifactStore, lock: RunLock, ledger: Ledger, swept: list[Path]) -> None:
        super().__init__(path, store, lock, ledger, swept)
        self.timed = self.store = TimedStore(path)


def writing(config: RunConfig) -> dict[str, Any]:
    """Seconds of all iterations of a run, and those spent on files."""
    assert config.run is not None
    began = time.perf_counter()
    with TimedDirectory.create_or_open(config.runs / config.run) as directory:
        directory.write_description(public_dump(config), current_code())
        with open_run(config, plan_of(config), directory, Console(io.StringIO(), config.steps)) as run:
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
        "steps": config.steps,
        "seconds": {"run": whole, "iterations": iterations, "checkpoints": checkpoints},
        "file_seconds": {"artifacts": puts, "ledger_manifest_and_keys": outside, "shards": shards},
        "milliseconds_per_step": 1000 * files / config.steps,
        "share_of_iterations": files / iterations,
        "share_of_run": files / whole,
    }


def iteration_seconds(run: LiveRun, index: int) -> tuple[float, float]:
    """How long an iteration took, and how long the bodies of its tasks."""
    began = time.perf_counter()
    results = iterate(run, index, carried(run, index))
    return time.perf_counter() - began, sum(result.entry.seconds for result in results.values())


def checkpoint_seconds(run: LiveRun, index: int) -> float:
    """How long the checkpoint of a step took; 0 when none was due."""
    began = time.perf_counter()
    if checkpoint_due(run, index):
        save_state(run, index)
    return time.perf_counter() - began


def shard_seconds(run: LiveRun, index: int) -> float:
    """How long the shards of a step take: groups whose longest completions are equally long were written together."""
    rollouts = run.directory.store.get_table(run.directory.ledger.artifacts(index)["rollouts"])
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


def resume(settings: dict[str, Any], *lengths: int) -> dict[str, Any]:
    """One run taken to each number of steps in turn; what resuming costs there."""
    measured = {}
    for steps in lengths:
        config = load_config("tiny", {**settings, "run": "resume", "steps": steps})
        with opened(config) as run:
            train(run)
        measured[str(steps)] = resumption(load_config("tiny", {**settings, "run": "resume", "steps": steps + 1}))
    return measured


@contextmanager
def opened(config: RunConfig) -> Iterator[LiveRun]:
    assert config.run is not None
    plan, console = plan_of(config), Console(io.StringIO(), config.steps)
    with open_directory(config, config.run) as directory, open_run(config, plan, directory, console) as run:
        yield run


def resumption(config: RunConfig) -> dict[str, Any]:
    """Seconds until the next step of a finished run may begin, its ledger's share, and how much there is to open."""
    assert config.run is not None
    ledger = config.runs / config.run / LEDGER
    began = time.perf_counter()
    with opened(config) as run:
        redone = begin(run)
        index = next_step(run)
        carried(run, index)
        seconds = time.perf_counter() - began
    assert (redone, index) == (0, config.steps)
    return {
        "seconds": seconds,
        "ledger_seconds": {
            "ends": reading_seconds(LedgerView.glance, ledger),
            "whole": reading_seconds(LedgerView.read, ledger),
        },
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


def table(result: dict[str, Any]) -> str:
    """Measurements beside their bounds, as Markdown."""
    written, stored, resumed = result["writing"], result["parquet"], result["resume"]
    raw, kept = stored["bytes_per_token"]["raw"], stored["bytes_per_token"]["stored"]
    long = resumed[max(resumed, key=int)]
    bounds = result["bounds"]
    rows = [
        ("files of an iteration, share of its time", f"{written['share_of_iterations']:.1%}", f"{bounds['share']:.0%}"),
        ("files of an iteration", f"{written['milliseconds_per_step']:.1f} ms", ""),
        ("512 x 4,096 tokens as parquet", f"{stored['seconds']['median']:.2f} s", f"{bounds['parquet_seconds']} s"),
        ("bytes a token, raw -> stored", f"{raw:.1f} -> {kept:.1f}", ""),
        *(
            (f"resume after {steps} steps", f"{at['seconds']:.2f} s", f"{bounds['resume_seconds']} s")
            for steps, at in resumed.items()
        ),
        ("of this, the ledger's ends", f"{1000 * long['ledger_seconds']['ends']:.1f} ms", ""),
        ("the whole ledger, for comparison", f"{1000 * long['ledger_seconds']['whole']:.0f} ms", ""),
    ]
    return "\n".join(
        ["| what | measured | bound |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
