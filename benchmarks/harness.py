"""Shared parts of the benchmarks: the schema of rows and their files, tables, and measurements as processes.

A results file is a list of rows. Every row has `kind`, what was measured, and where it comes from: `commit` and `dirty`
(null and absent without a checkout), `versions`, `hardware` and `command`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from fp8core.store.manifest import git_state, hardware, library_versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PRECISIONS = {"bf16": "BF16", "fp8_linear": "FP8 linears", "fp8_linear_kv": "FP8 linears, cache and attention"}
MODELS = {"qwen3-8b": "Qwen3-8B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
# A step of a small model has ended in tenths of a second; what is awaited may be one task of it.
_POLL_SECONDS = 0.02

Row = dict[str, Any]


# Rows


def stored(name: str) -> list[Row]:
    """The rows of a file of results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def gpu_here() -> Row:
    """Name of the GPU of this machine; empty where there is none."""
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def provenance(**versions: str) -> Row:
    """Commit, versions, hardware and command of this process; `versions` are of further libraries."""
    state = git_state(ROOT)
    if not state:
        print(f"{ROOT} is no git checkout: the rows have no commit", file=sys.stderr, flush=True)
    script = Path(sys.argv[0]).absolute()
    module = ".".join(script.relative_to(ROOT).with_suffix("").parts) if script.is_relative_to(ROOT) else script.name
    return {
        "commit": None,
        **state,
        "versions": library_versions() | versions,
        "hardware": hardware() | gpu_here(),
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*rows], indent=1) + "\n")


class RowFile:
    """The rows of a measurement, in a file as soon as they are known: they survive any end of this process."""

    def __init__(self, path: Path, **about: Any) -> None:
        """Every row gets `about` and the provenance of this process."""
        self._path, self._about, self._provenance = path, about, provenance()
        self.rows: list[Row] = []
        self._write()

    def append(self, row: Row) -> None:
        """Add a row; its own fields of provenance stay."""
        self.rows.append({"kind": row["kind"], **self._about, **self._provenance, **row})
        self._write()

    def append_growing(self, states: Iterator[Row]) -> None:
        """Add one row, of which each of `states` is a later state."""
        before = len(self.rows)
        for state in states:
            del self.rows[before:]
            self.append(state)

    def fail(self, error: Exception) -> None:
        """Add a row with the error that ended the measurement."""
        trace = "".join(traceback.format_exception(error))[-4000:]
        self.append({"kind": "error", "error": f"{type(error).__name__}: {error}"[-2000:], "traceback": trace})

    def _write(self) -> None:
        write_rows(self._path, self.rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; vertical bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def part_of(name: str, parts: Iterable[tuple[str, Sequence[str]]]) -> str:
    """The part of a step that a kernel belongs to: the first of which a word is in its name."""
    return next((part for part, words in parts if any(word in name for word in words)), "other")


# Processes


def training_command(config: str, settings: Sequence[str]) -> list[str]:
    """`fp8-grpo run` of this interpreter, to be started in ROOT; settings are `key=value`."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return [sys.executable, "-m", "flows.cli", "run", config, *flags]


def start(
    command: Sequence[str], log: IO[bytes] | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in ROOT with a session of its own, so that it can be ended with all that it starts.

    `variables` are of its environment, beside those of this process.
    """
    output = {} if log is None else {"stdout": log, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, env={**os.environ, **(variables or {})}, **output
    )


def ended(process: "subprocess.Popen[bytes]", deadline: float) -> int:
    """The exit code of a process; at the deadline (time.monotonic) it is killed with its children: -9."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def run_until(command: Sequence[str], log: IO[bytes], stop: float, end: float) -> int:
    """Run a training, send SIGTERM at the moment `stop` so that it ends after its step, and kill it at `end`.

    Returns:
        its exit code; 143 when it stopped after a step, -9 when it was killed.
    """
    process = start(command, log)
    with suppress(subprocess.TimeoutExpired):
        return _reaped(process, process.wait(max(0.0, stop - time.monotonic())))
    process.terminate()
    return _reaped(process, ended(process, end))


def run_till(command: Sequence[str], log: IO[bytes], reached: Callable[[], bool], end: float) -> int:
    """Run a training and kill it as soon as `reached` returns true, at the latest at `end` (time.monotonic).

    For trainings of which only what is committed matters: nothing is written after that moment, no checkpoint either.

    Returns:
        its exit code; -9 when it was killed.
    """
    process = start(command, log)
    while (code := process.poll()) is None and not reached() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return _reaped(process, code)


def _reaped(process: "subprocess.Popen[bytes]", code: int | None) -> int:
    if code != 0:
        # The processes of an engine outlive a training that was killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
