"""Seconds from the loss of an engine, a rank or a node to the next generated token, and completions that are lost.

    python -m benchmarks.recovery --out FOLDER                               two simulated nodes on a CPU
    python -m benchmarks.recovery --out FOLDER --gpus 4 --config h200-small  two nodes with half of the GPUs each

One run goes on through all accidents, each in a step of its own after a step without any. An engine and a node end
while completions are generated, a rank while it trains. Every process ends by SIGKILL; a node is `raylet` with all its
processes, and another one takes its place at once. `seconds` end when the first completion of the new processes is
stored. `noticed` is when the run says what it lost.

A completion is finished when it is in a shard. Each shard is kept under a second name before the run can remove it. A
completion is `lost` if its step ends without it, and `again` if a later shard has it too.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
from ray.cluster_utils import Cluster

from benchmarks.harness import Row, provenance, start, training_command, write_rows
from benchmarks.tables import recovery_table
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView

RESULT = "recovery"
LOST = ("engine", "rank", "node")
_NODES = 2
_POLL_SECONDS = 0.002
_REPLACED = "all processes are replaced"
# Steps that take long enough for an accident in their middle: an engine has sixteen batches.
_SIZES = {"rollout.prompts_per_step": 32, "rollout.max_batch": 8, "training.minibatches": 4}


class Nodes:
    """A simulated cluster: a head without places for processes, and nodes that share the GPUs, or a CPU each."""

    def __init__(self, gpus: int) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [(self._cluster.add_node(**made), made) for made in _node_arguments(gpus)]
        self._cluster.wait_for_nodes()
        self.address = self._cluster.address

    def lose(self) -> None:
        """Kill a node with its processes, and start another one like it."""
        node, made = self._nodes.pop(0)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append((self._cluster.add_node(**made), made))

    def close(self) -> None:
        self._cluster.shutdown()


def _node_arguments(gpus: int) -> Iterator[dict[str, Any]]:
    share = gpus // _NODES
    for i in range(_NODES):
        if gpus:
            # Without it every node of one host numbers its GPUs from 0.
            seen = ",".join(str(gpu) for gpu in range(i * share, (i + 1) * share))
            yield {"num_cpus": 4 * share, "num_gpus": share, "env_vars": {"CUDA_VISIBLE_DEVICES": seen}}
        else:
            yield {"num_cpus": 1}


class Watched:
    """A run that goes on, as its folder and its log show it; its shards stay under a second name."""

    def __init__(self, folder: Path, log: Path, process: "subprocess.Popen[bytes]", patience: float) -> None:
        """`patience`: seconds in which a step comes; the first compiles what is not there."""
        self._folder, self._log, self._process, self._patience = folder, log, process, patience
        self._kept = folder.with_name(f"{folder.name}-shards")

    def until(self, reached: Callable[[], Any], what: str) -> Any:
        """The first true value of `reached`. Raises RuntimeError: the run ended, or it took too long."""
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            self._keep()
            if found := reached():
                return found
            if self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"{what} did not come: {self._log.read_text(errors='replace')[-4000:]}")

    def committed(self) -> int:
        """The last step; before step 0, -1."""
        path = self._folder / LEDGER
        last = LedgerView.read(path).last_step() if path.exists() else None
        return START - 1 if last is None else last

    def trains(self, step: int) -> bool:
        """True when all tasks before the training of a step are done, and no process was lost in it."""
        return "logprobs" in LedgerView.read(self._folder / LEDGER).tasks(step)

    def losses(self) -> int:
        """How often all processes were replaced."""
        return self._log.read_text(errors="replace").count(_REPLACED)

    def processes(self, step: int) -> dict[str, int]:
        """The process of each member in a committed step."""
        manifest = self._store().get_json(LedgerView.read(self._folder / LEDGER).steps()[step].manifest)
        return {name: place["pid"] for name, place in manifest["observed"]["cluster"].items()}

    def shards(self) -> list[Path]:
        """All shards that were ever stored, by step and number."""
        return sorted(self._kept.glob("*/*.parquet"))

    def finished(self, step: int) -> Counter[tuple[Any, ...]]:
        """How often each completion of a step was stored in a shard."""
        shards = (self._kept / f"{step:05d}").glob("*.parquet")
        return Counter(each for shard in shards for each in _completions(pq.read_table(shard)))

    def rollouts(self, step: int) -> set[tuple[Any, ...]]:
        """The completions of a committed step."""
        ref = LedgerView.read(self._folder / LEDGER).artifacts(step)["rollouts"]
        return {*_completions(self._store().get_table(ref))}

    def _store(self) -> ArtifactStore:
        return ArtifactStore(self._folder)

    def _keep(self) -> None:
        for shard in (self._folder / "shards").glob("*/*.parquet"):
            kept = self._kept / shard.parent.name / shard.name
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                _link(shard, kept)


def _link(shard: Path, kept: Path) -> None:
    """The run may remove a shard at any moment."""
    try:
        kept.hardlink_to(shard)
    except FileNotFoundError:
        print(f"{shard} was removed before it could be kept", file=sys.stderr, flush=True)


def _completions(rollouts: Any) -> Iterator[tuple[Any, ...]]:
    for row in rollouts.select(["group", "sample", "tokens"]).to_pylist():
        yield row["group"], row["sample"], tuple(row["tokens"])


def accident(run: Watched, nodes: Nodes, lost: str) -> Row:
    """Lose something in the next step but one; returns seconds and completions."""
    before, losses = run.until(lambda: max(run.committed(), 0), "a step"), run.losses()
    step = before + 1
    pids = run.processes(before)
    if lost == "rank":
        run.until(lambda: run.trains(step), f"training of step {step}")
    else:
        run.until(lambda: run.finished(step), f"a completion of step {step}")
    began = time.monotonic()
    if lost == "node":
        nodes.lose()
    else:
        os.kill(pids[f"{lost} 1"], signal.SIGKILL)
    run.until(lambda: run.losses() > losses, f"the loss of a {lost}")
    noticed, stored = time.monotonic() - began, len(run.shards())
    finished = run.finished(step)
    run.until(lambda: len(run.shards()) > stored, "a completion of the new processes")
    seconds = time.monotonic() - began
    # Its manifest names the new processes.
    run.until(lambda: run.committed() > step, f"the end of step {step + 1}")
    again = sum(count - 1 for count in run.finished(step).values())
    missing = finished.keys() - run.rollouts(step)
    row = {"step": step, "noticed": noticed, "seconds": seconds, "finished": len(finished)}
    print(lost, row, "lost", len(missing), "again", again, flush=True)
    return row | {"lost": len(missing), "again": again}


def main(arguments: Sequence[str] | None = None) -> int:
    """Lose engines, ranks and nodes in turn, and write a row of each kind."""
    options = _options(arguments)
    out = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {lost: [] for lost in LOST}
    about = {"model": options.config, "gpus": options.gpus, "nodes": _NODES} | _processes(options) | provenance()
    with _started(options, out) as (run, nodes):
        for _ in range(options.times):
            for lost in LOST:
                found[lost].append(accident(run, nodes, lost))
                rows = [_row(lost, each) | about for lost, each in found.items() if each]
                write_rows(out / f"{RESULT}.json", rows)
    print(recovery_table(rows), flush=True)
    return int(any(row["lost"] for row in rows))


def _processes(options: argparse.Namespace) -> dict[str, int]:
    count = options.gpus or _NODES
    return {"engines": count, "ranks": count}


@contextmanager
def _started(options: argparse.Namespace, out: Path) -> Iterator[tuple[Watched, Nodes]]:
    nodes, run, count = Nodes(options.gpus), f"recovery-{os.getpid()}", options.gpus or _NODES
    settings = {
        **({} if options.gpus else _SIZES),
        "cluster.address": nodes.address,
        "cluster.engines": count,
        "cluster.ranks": count,
        "cluster.replacements": 1000,
        "steps": 100_000,
        "evaluation.every": 100_000,
        "checkpoint.every": 1,
        "runs": out / "runs",
        "run": run,
    }
    flags = [*(f"{key}={value}" for key, value in settings.items()), *options.overrides]
    python, *rest = training_command(options.config, flags)
    log = out / "logs" / f"{run}.log"
    with log.open("wb") as output:
        process = start([python, "-u", *rest], output)
        try:
            yield Watched(out / "runs" / run, log, process, options.patience), nodes
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            nodes.close()


def _row(lost: str, accidents: Sequence[Row]) -> Row:
    seconds = [each["seconds"] for each in accidents]
    noticed = [each["noticed"] for each in accidents]
    return {
        "kind": "recovery",
        "what": lost,
        "times": len(accidents),
        "seconds": {"median": median(seconds), "largest": max(seconds), "all": seconds},
        "noticed": {"median": median(noticed), "largest": max(noticed), "all": noticed},
        "finished": sum(each["finished"] for each in accidents),
        "lost": sum(each["lost"] for each in accidents),
        "again": sum(each["again"] for each in accidents),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, its log and the rows")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs, an engine and a rank on each (default: a CPU)")
    parser.add_argument("--times", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for a step to come (default 300)")
    parser.add_argument("--config", default="tiny")
    parser.add_argument("overrides", nargs="*", help="further settings, key=value")
    options = parser.parse_args(arguments)
    if options.gpus % _NODES:
        parser.error(f"--gpus {options.gpus}: {_NODES} nodes share them")
    return options


if __name__ == "__main__":
    sys.exit(main())
