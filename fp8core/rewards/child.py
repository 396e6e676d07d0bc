"""A child process of the verifier pool: it checks answers, one at a time, within limits of its own.

The channel is a socket with one JSON text a line. First comes the task: name and options of the scorer, and limits. The
child replies with what it loaded. From then on every line is an answer, or a reference to check, and gets a verdict as
[score, outcome, detail].

The pool ends a child that exceeds its wall-clock limit. Processor time is counted here, by the kernel, and ends the
process even inside a C function that gives nothing else a chance. So is memory. A scorer that may be interrupted is
interrupted a little before either limit. Its process stays: to start one takes longer than to check a thousand answers.
Processes that a check has started end before its verdict is sent.
"""

import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from fp8core.errors import UserError, described_error
from fp8core.processes.supervisor import CPU_SIGNAL, end_descendants, limit_memory
from fp8core.rewards.scorer import (
    DETAIL_CHARACTERS,
    RIGHT,
    Answer,
    LoadedScorer,
    Scorer,
    Verdict,
    crashed,
    load_scorer,
    timed_out,
    unparsed,
)

_INTERRUPTED_AT = 0.8
"""Of a limit; what an interruption does not reach ends with its process at the limit."""


def serve(channel: int) -> None:
    """Check answers until the channel ends; `channel`: descriptor of our end of the socket."""
    os.set_inheritable(channel, False)
    with socket.socket(fileno=channel) as connection, connection.makefile("rwb") as lines:
        task = json.loads(lines.readline())
        try:
            loaded = load_scorer(task["name"], task["options"], task["columns"])
        except UserError as error:
            _say(lines, {"failed": str(error)})
            return
        limit_memory(task["memory_mb"])
        _say(lines, {"loaded": loaded.description})
        for line in lines:
            verdict = _within(task, loaded, json.loads(line))
            end_descendants()
            _say(lines, [float(verdict.score), verdict.outcome, verdict.detail[:DETAIL_CHARACTERS]])


def _within(task: Mapping[str, Any], loaded: LoadedScorer, texts: list[str]) -> Verdict:
    """The verdict on a line, or the end of this process when it takes too much processor time."""
    cpu_seconds, timeout_seconds = task["cpu_seconds"], task["timeout_seconds"]
    try:
        signal.signal(CPU_SIGNAL, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        if loaded.interruptible:
            signal.signal(signal.SIGVTALRM, _interrupt)
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_VIRTUAL, _INTERRUPTED_AT * cpu_seconds)
            signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_AT * timeout_seconds)
        own = os.getpid()
        try:
            return _verdict(loaded.scorer, texts, loaded.file)
        finally:
            if os.getpid() != own:
                # A copy that the scorer forked and let return; its verdict would be taken for the next answer's.
                os._exit(0)
            for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
                signal.setitimer(timer, 0)
    except _Interrupted as interrupted:
        if interrupted.signal == signal.SIGALRM:
            return timed_out(f"no verdict after {_INTERRUPTED_AT * timeout_seconds:g} s")
        return timed_out(f"more than {_INTERRUPTED_AT * cpu_seconds:g} s of processor time")


class _Interrupted(BaseException):
    """The time for an answer is over. No Exception: libraries catch those."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def _interrupt(number: int, _: object) -> None:
    raise _Interrupted(number)


def _verdict(scorer: Scorer, texts: list[str], file: str | None) -> Verdict:
    try:
        if len(texts) == len(Answer._fields):
            return scorer.score(*texts)
        scorer.check(*texts)
        return RIGHT
    except UserError as error:
        return unparsed(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the verdict says what was raised
        return crashed(described_error(error, file))


def _say(lines: Any, message: Mapping[str, Any] | list[Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()
