"""How long a step's metrics take on a host that is busy with other things, by the threads that compute them.

    python -m benchmarks.record_threads --out FILE

The metrics are those of `tasks.record`, of 192 completions of 1,024 tokens: hundreds of operations on 200,000 numbers.
Beside them run as many processes that only compute as --busy says. On a CPU; the best of three after one that is not
counted, since what is asked is not how long the kernel lets a process wait before it begins.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks.trainings import ROOT
from fp8core.rl.columns import column
from fp8core.store.versions import git_state, hardware, library_versions
from tasks.record import mismatch, rollout_metrics, torch_threads

COMPLETIONS, TOKENS, REPEATS = 192, 1024, 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the rows and print their table."""
    parser = argparse.ArgumentParser(description="A step's metrics on a busy host, by the threads that compute them.")
    parser.add_argument("--out", type=Path, required=True, help="file of the rows")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="processes beside it")
    options = parser.parse_args(arguments)
    about = {"git": git_state(ROOT), "versions": library_versions(), "hardware": hardware()}
    about["command"] = "python -m benchmarks.record_threads --out FILE"
    rows = list[dict[str, Any]]()
    for busy in options.busy:
        with others(busy):
            rows += [{"kind": "record", "busy": busy, **timed(threads), **about} for threads in options.threads]
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that compute."""
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
    """Milliseconds of the metrics, computed by so many threads."""
    rollouts, logprobs = tables()
    seconds = list[float]()
    with torch_threads(threads):
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            rollout_metrics(rollouts, logprobs)
            mismatch(rollouts, logprobs)
            seconds.append(time.perf_counter() - began)
    return {"threads": threads, "milliseconds": round(1000 * min(seconds[1:]), 1), "completions": COMPLETIONS}


def tables() -> tuple[pa.Table, pa.Table]:
    """What a rollout and its scoring store of random completions that differ by a hundredth of a nat."""
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, as Markdown."""
    cores = {row["hardware"]["cores"] for row in rows}
    lines = [f"| processes beside it, on {', '.join(map(str, cores))} processors | threads | ms |", "| --- " * 3 + "|"]
    return "\n".join([*lines, *(f"| {row['busy']} | {row['threads']} | {row['milliseconds']:.0f} |" for row in rows)])


if __name__ == "__main__":
    main()
