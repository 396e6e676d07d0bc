"""Host costs of the process beside a GPU: a step's metrics and losses, and Python's garbage collector.

    python -m benchmarks.host_costs --out FILE

Metrics (`step_metrics`) are of 192 completions of 1,024 tokens, correction and losses of the same, twelve at a time.
These are hundreds of operations on 200,000 numbers, by number of threads, beside --busy processes that only compute. A
full collection is that of a process which has imported what a training imports, as it is, and with all of it frozen
(`fp8core.run.context`). Medians of five after one that is not counted. On a CPU.
"""

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

import flows.grpo  # noqa: F401 - what a training imports
from benchmarks.harness import provenance, table, write_rows
from fp8core.config.loss import LossConfig
from fp8core.config.training import CorrectionConfig
from fp8core.rl.batch import RolloutBatch, TokenBatch, column
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import Objective
from fp8core.run.context import gc_freeze, gc_unfreeze
from fp8core.run.step_metrics import mismatch, rollout_metrics, torch_threads

COMPLETIONS, TOKENS, PROMPT, TOGETHER, REPEATS = 192, 1024, 16, 12, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the rows and print their tables."""
    parser = argparse.ArgumentParser(description="What the process beside a GPU takes of its own.")
    parser.add_argument("--out", type=Path, required=True, help="file of the rows")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="processes beside it")
    options = parser.parse_args(arguments)
    about = provenance()
    rows = [{**row, **about} for row in collections()]
    for busy in options.busy:
        with others(busy):
            rows += [{**timed(threads), "busy": busy, **about} for threads in options.threads]
    write_rows(options.out, rows)
    print(*tables(rows), sep="\n\n")


@contextmanager
def others(count: int) -> Iterator[None]:
    """`count` processes that compute."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def compute() -> None:
    """Keep a processor busy until this process is killed."""
    while True:
        pass


def timed(threads: int) -> dict[str, Any]:
    """Milliseconds of metrics, and of correction and losses, computed by `threads` threads."""
    rollouts, logprobs = metrics_of()
    compared = torch.ones(len(rollouts), dtype=torch.bool)
    batch, objective = batch_of(), Objective(LossConfig(), CorrectionConfig(method="token_tis"))
    with torch_threads(threads):
        metrics = median(lambda: (rollout_metrics(rollouts, logprobs), mismatch(rollouts, logprobs, compared, 2.0)))
        losses = median(lambda: losses_of(objective, batch))
    return {
        "kind": "threads",
        "threads": threads,
        "completions": COMPLETIONS,
        "metrics_ms": metrics,
        "losses_ms": losses,
    }


def median(work: Callable[[], object]) -> float:
    """Milliseconds, the median of some after one that is not counted."""
    seconds = list[float]()
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds[1:]), 1)


def metrics_of() -> tuple[pa.Table, pa.Table]:
    """Stored tables of a rollout and its scoring, of random completions that differ by a hundredth of a nat."""
    generator = torch.Generator().manual_seed(0)
    shape = (COMPLETIONS, TOKENS)
    lengths = torch.full((COMPLETIONS,), TOKENS).numpy()
    rollout = -3 * torch.rand(shape, generator=generator)
    training = rollout + 0.01 * torch.randn(shape, generator=generator)
    columns = {"logprobs": rollout, "written": torch.ones(shape, dtype=torch.bool)}
    rollouts = {name: column(values, lengths) for name, values in columns.items()}
    scored = {"logprobs": training, "entropy": torch.rand(shape, generator=generator)}
    return (
        pa.table({**rollouts, "finish": ["length"] * COMPLETIONS}),
        pa.table({name: column(values, lengths) for name, values in scored.items()}),
    )


def batch_of() -> RolloutBatch:
    """The same sizes, as a trainer gets them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 1000, (COMPLETIONS, PROMPT + TOKENS), generator=generator)
    rows = TokenBatch.of(tokens[:, :PROMPT].tolist(), tokens[:, PROMPT:].tolist())
    rollout = -3 * torch.rand(COMPLETIONS, TOKENS, generator=generator)
    old = rollout + 0.01 * torch.randn(rollout.shape, generator=generator)
    advantages = torch.randn(COMPLETIONS, generator=generator)
    every = torch.ones(COMPLETIONS, TOKENS, dtype=torch.bool)
    return RolloutBatch(rows, every, old, rollout, None, advantages, every[:, 0])


def losses_of(objective: Objective, batch: RolloutBatch) -> None:
    """A trainer's work on the CPU for one update: correction, and the loss of each part with its gradient."""
    corrected, _ = objective.corrected(batch)
    denominator = Denominator.of(corrected.mask)
    for start in range(0, COMPLETIONS, TOGETHER):
        part = corrected.rows(slice(start, start + TOGETHER))
        terms = objective(part.old_logprobs.clone().requires_grad_(), part, denominator)
        terms.statistics()
        terms.loss.backward()  # type: ignore[no-untyped-call]


def collections() -> list[dict[str, Any]]:
    """A full collection of this process, as it is and frozen."""
    gc.collect()
    row = {"kind": "collection", "objects": len(gc.get_objects())}
    as_it_is = {**row, "frozen": False, "milliseconds": median(gc.collect)}
    gc_freeze()
    try:
        return [as_it_is, {**row, "frozen": True, "milliseconds": median(gc.collect)}]
    finally:
        gc_unfreeze()


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of the threads, and of collections, as Markdown."""
    cores = ", ".join(sorted({str(row["hardware"]["cores"]) for row in rows}))
    timed_rows = [
        [str(row["busy"]), str(row["threads"]), f"{row['metrics_ms']:.0f}", f"{row['losses_ms']:.0f}"]
        for row in rows
        if row["kind"] == "threads"
    ]
    collected = [
        ["what is new" if row["frozen"] else "everything", f"{row['objects']:,}", f"{row['milliseconds']:.1f}"]
        for row in rows
        if row["kind"] == "collection"
    ]
    threads = ["processes beside it, on " + cores + " processors", "threads", "metrics, ms", "losses, ms"]
    return [
        table(threads, timed_rows),
        table(["the collector sees", "objects alive", "a full collection, ms"], collected),
    ]


if __name__ == "__main__":
    main()
