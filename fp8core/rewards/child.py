"""What a child process of the verifier pool does: check answers, one at a time, within limits of its own.

The channel is a socket with one JSON text a line. First comes the task: name and options of the scorer, and limits. The
child says what it loaded. From then on every line is an answer, or a reference to check, and gets a verdict as [score,
outcome, detail].

The parent ends a child that exceeds its wall-clock limit. Processor time is counted here, by the kernel, and ends the
process even inside a C function that gives nothing else a chance; so is memory. When the parent is gone, however it
went, the process group ends with it.
"""

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8core.errors import UserError, first_line
from fp8core.rewards.scorer import Answer, Scorer, load_scorer
from fp8core.rewards.verdict import RIGHT, Verdict, crashed, unparsed

CPU_SIGNAL = signal.SIGPROF
_PARENT_CHECK_SECONDS = 0.5
DETAIL_CHARACTERS = 200
_STATM = Path("/proc/self/statm")


def serve(channel: int, parent: int) -> None:
    """Check answers until the channel ends.

    Args:
        channel: descriptor of our end of the socket.
        parent: process id of who started us.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as lines:
        task = json.loads(lines.readline())
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            loaded = load_scorer(task["name"], task["options"])
        except UserError as error:
            _say(lines, {"failed": str(error)})
            return
        limit_memory(task["memory_mb"])
        _say(lines, {"loaded": loaded.description})
        for line in lines:
            verdict = _within(task["cpu_seconds"], loaded.scorer, json.loads(line))
            _say(lines, [float(verdict.score), verdict.outcome, verdict.detail[:DETAIL_CHARACTERS]])


def limit_memory(megabytes: int) -> None:
    """Let the process take so much address space beyond what it has; only Linux says how much that is, and obeys."""
    if _STATM.exists():
        taken = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        limit = taken + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _within(cpu_seconds: float, scorer: Scorer, texts: list[str]) -> Verdict:
    """The verdict on a line, or the end of this process when it takes too much processor time."""
    signal.signal(CPU_SIGNAL, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return _verdict(scorer, texts)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _verdict(scorer: Scorer, texts: list[str]) -> Verdict:
    try:
        if len(texts) == len(Answer._fields):
            return scorer.score(*texts)
        scorer.check(*texts)
        return RIGHT
    except UserError as error:
        return unparsed(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the verdict says what was raised
        return crashed(f"{type(error).__name__}: {first_line(error)}")


def _say(lines: Any, message: Mapping[str, Any] | list[Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def _end_with(parent: int) -> None:
    """End the process group when the parent is gone: who is an orphan has another parent."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.killpg(0, signal.SIGKILL)
