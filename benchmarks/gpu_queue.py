"""Run measurements side by side on the GPUs of one host: a queue of commands for some of them.

    python -m benchmarks.gpu_queue --out D queues/0.txt queues/1.txt queues/2,3.txt

A queue is a file named after its GPUs. A line of it is how many seconds a command may take, and the
command; `{out}` in it is D and `{gpus}` its name:

    420 python -m benchmarks.large_ledger --out {out}/large --seconds 400 bf16

Lines may be added while it runs: a queue is read again whenever a command has ended. Every queue has a Prefect of its
own, because servers would meet on one database. D/gpu_queue.jsonl has a row for each command that ended, D/GPUS/N.log
its output. Measurements of time belong on a host of their own: queues share processors, and engines start slower.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT

RESULT = "gpu_queue.jsonl"
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Line:
    """A command and the seconds it may take."""

    seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Queue:
    """Some GPUs and their commands."""

    gpus: str
    queue: Path
    out: Path

    def run(self, written: threading.Lock) -> list[int]:
        """Run line after line until there is none left; returns their exit codes."""
        codes = list[int]()
        while len(codes) < len(lines := read_lines(self.queue, self.out, self.gpus)):
            row = self._run(lines[len(codes)], len(codes) + 1)
            codes.append(row["code"])
            with written, (self.out / RESULT).open("a") as results:
                results.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        return codes

    def _run(self, line: Line, number: int) -> dict[str, Any]:
        folder = self.out / self.gpus
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (folder / f"{number}.log").open("wb") as log:
            process = subprocess.Popen(
                line.command, cwd=ROOT, env=self._environment(folder), stdout=log, stderr=log, start_new_session=True
            )
            code = _ended(process, line.seconds)
        seconds = round(time.monotonic() - began, 1)
        return {"gpus": self.gpus, "command": shlex.join(line.command), "code": code, "seconds": seconds}

    def _environment(self, folder: Path) -> Mapping[str, str]:
        return os.environ | {"CUDA_VISIBLE_DEVICES": self.gpus, "PREFECT_HOME": str(folder / "prefect")}


def read_lines(queue: Path, out: Path, gpus: str) -> list[Line]:
    """The lines of a queue; `python` is this one.

    Raises:
        ValueError: a line does not begin with seconds, or names no command.
    """
    return [_parsed(text, f"{queue}:{n}", out, gpus) for n, text in enumerate(queue.read_text().splitlines(), 1)]


def _parsed(text: str, place: str, out: Path, gpus: str) -> Line:
    seconds, _, command = text.partition(" ")
    if not command or not seconds.replace(".", "", 1).isdigit():
        raise ValueError(f"{place}: a line is seconds and a command, this one is {text!r}")
    words = shlex.split(command.replace("{out}", str(out)).replace("{gpus}", gpus))
    return Line(float(seconds), (sys.executable, *words[1:]) if words[0] == "python" else tuple(words))


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Exit code of a process, which is ended with its children after `seconds`."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    # Trainings and engines have sessions of their own, and would keep the GPU from the next command.
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all queues; returns 0 when every command ended with 0, else 1."""
    parser = argparse.ArgumentParser(description="Run queues of commands on the GPUs of a host, side by side.")
    parser.add_argument("queues", nargs="+", type=Path, metavar="QUEUE", help="a file named after GPUs: 0.txt, 2,3.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    queues = [Queue(queue.stem, queue, out) for queue in options.queues]
    for queue in queues:
        try:
            read_lines(queue.queue, out, queue.gpus)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    written = threading.Lock()
    with ThreadPoolExecutor(len(queues)) as pool:
        codes = [code for found in pool.map(lambda queue: queue.run(written), queues) for code in found]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
