"""Verifiers in child processes that are killed and replaced when they hang, crash or take too much memory.

A pool is used by blocking calls and has no thread: it moves when it is called. `begin` hands out work and returns, so
the children check finished groups while the engine generates others; `verify` waits for the rest. Equal answers are
checked once. Results are dropped when `verify` returns: nothing that a record depends on lives here.
"""

import json
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import JsonValue

from fp8core.errors import UserError
from fp8core.processes.supervised import FROM_OUTSIDE, Lines, SupervisedProcess, described
from fp8core.processes.supervisor import CPU_SIGNAL
from fp8core.rewards.scorer import DETAIL_CHARACTERS, MOST_REWARD, OUTCOMES, Answer, Verdict, crashed, timed_out

_START_SECONDS = 120.0
_LONGEST_LINE = 1 << 16
"""Bytes from a process; a verdict has some hundred."""
_LARGEST_BATCH = 64
_WRITTEN = "something else was written to the verifier's channel"
Line = tuple[str, ...]
"""An answer, or (prompt, reference) to check."""


class _Worker:
    def __init__(self, task: Mapping[str, Any]) -> None:
        """`task` is the first line of the channel (fp8core/rewards/child.py)."""
        self.process = SupervisedProcess("fp8core.rewards.child")
        self.lines = Lines(self.process.connection, _LONGEST_LINE)
        self.description: dict[str, str] | None = None
        self.working_on: deque[Line] = deque()
        """Lines that were sent and have no verdict, the first of which is being worked on."""
        self.since = time.monotonic()
        """When it began with that one, or was started."""
        self.lines.send(_encoded(task))

    @property
    def ready(self) -> bool:
        return self.description is not None

    def give(self, lines: Iterable[Line]) -> None:
        assert self.ready, "a process is given work once it is ready"
        assert not self.working_on, "a process is given work when it is idle"
        self.working_on.extend(lines)
        self.since = time.monotonic()
        self.lines.send(b"".join(_encoded(line) for line in self.working_on))


def _encoded(message: Mapping[str, Any] | Line) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Limits(NamedTuple):
    """Of one answer: seconds, seconds of processor time, and memory (MiB) beyond what the loaded scorer takes."""

    timeout_seconds: float
    cpu_seconds: float
    memory_mb: int


class VerifierPool:
    """A resident pool of processes that serve one scorer; see Verifier. Safe for threads, which wait in turn."""

    def __init__(
        self, key: str, name: str, options: Mapping[str, JsonValue], limits: Limits, workers: int, columns: bool
    ) -> None:
        """Start `workers` processes, and wait until they have loaded the scorer.

        `key` is the setting that names it; `columns` as of `load_scorer`.

        Raises:
            UserError: they cannot.
        """
        self._setting = f"{key}={name}"
        self._limits = limits
        self._task = {"name": name, "options": dict(options), "columns": columns, **limits._asdict()}
        self._lock = threading.Lock()
        self._waiting: deque[Line] = deque()
        self._verdicts: dict[Line, Verdict] = {}
        self._known: set[Line] = set()
        self._killed: dict[Line | None, str] = {}
        """Lines whose first try something outside ended, and how; None: the start of a process."""
        self._description: dict[str, str] | None = None
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._start()
            while not all(worker.ready for worker in self._workers):
                self._move(self._patience())
        except BaseException:
            self.close()
            raise

    @property
    def main(self) -> "VerifierPool":
        return self

    def begin(self, answers: Sequence[Answer]) -> None:
        with self._lock:
            self._enqueue(answers)
            self._move(0)

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._wait_for(answers)

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        verdicts = self._wait_for(references)
        return [None if verdict.outcome == "right" else f"{self._setting}: {verdict.detail}" for verdict in verdicts]

    def describe(self) -> dict[str, JsonValue]:
        assert self._description is not None, "every process was ready once"
        return dict(self._description)

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                self._end(worker)
            self._workers.clear()

    def _wait_for(self, lines: Sequence[Line]) -> list[Verdict]:
        with self._lock:
            self._enqueue(lines)
            for line in lines:
                while line not in self._verdicts:
                    self._move(self._patience())
            verdicts = [self._verdicts[line] for line in lines]
            self._known -= self._verdicts.keys()
            self._verdicts.clear()
            return verdicts

    def _enqueue(self, lines: Iterable[Line]) -> None:
        new = [line for line in dict.fromkeys(map(tuple, lines)) if line not in self._known]
        self._known.update(new)
        self._waiting.extend(new)

    def _move(self, seconds: float) -> None:
        """Hand out work, wait at most so long for an event, take in verdicts, and replace late or dead processes."""
        self._hand_out()
        readable = set()
        for key, events in self._selector.select(seconds):
            if events & selectors.EVENT_WRITE:
                self._pass_on(key.data)
            if events & selectors.EVENT_READ:
                readable.add(key.data)
        for worker in readable:
            self._take_in(worker)
        now = time.monotonic()
        # A verdict that lay in the channel was in time, however late this process came to read it.
        for worker in [worker for worker in self._workers if worker not in readable]:
            if worker.working_on and now > worker.since + self._limits.timeout_seconds:
                late = timed_out(f"no verdict after {self._limits.timeout_seconds:g} s")
                self._end(worker)
                self._replace(worker, late)
            elif not worker.ready and now > worker.since + _START_SECONDS:
                raise self._unusable(f"it was not imported after {_START_SECONDS:g} s")

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and not worker.working_on]
        for worker in idle:
            # Small enough that no process is left with much while the others have nothing.
            count = min(_LARGEST_BATCH, math.ceil(len(self._waiting) / (2 * len(self._workers))))
            if count:
                worker.give([self._waiting.popleft() for _ in range(count)])
                self._watch(worker)

    def _take_in(self, worker: _Worker) -> None:
        lines, ended = worker.lines.read()
        for line in lines:
            if not worker.ready:
                self._admit(worker, line)
            elif not worker.working_on or (verdict := _verdict(line)) is None:
                self._end(worker)
                self._replace(worker, crashed(_WRITTEN))
                return
            else:
                self._settle(worker, verdict)
        if ended:
            self._replace_ended(worker)

    def _admit(self, worker: _Worker, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._unusable(_WRITTEN) from error
        if "failed" in message:
            raise self._unusable(message["failed"])
        worker.description = message["loaded"]
        if self._description not in (None, worker.description):
            raise self._unusable(f"it changed while it was used: {self._description}, now {worker.description}")
        self._description = worker.description
        self._killed.pop(None, None)

    def _settle(self, worker: _Worker, verdict: Verdict) -> None:
        line = worker.working_on.popleft()
        if (how := self._killed.pop(line, None)) is not None:
            verdict = replace(verdict, note=f"second try: in the first {how}")
        self._verdicts[line] = verdict
        worker.since = time.monotonic()

    def _replace_ended(self, worker: _Worker) -> None:
        """Replace a process that ended by itself. One that something outside has killed gets another try, once."""
        code = worker.process.exit_code()
        self._end(worker)
        how = described(code)
        line = worker.working_on[0] if worker.working_on else None
        if code in FROM_OUTSIDE and (line or not worker.ready) and line not in self._killed:
            self._killed[line] = how
            self._replace(worker)
        elif not worker.ready:
            raise self._unusable(f"{how} before it was ready")
        elif code == -CPU_SIGNAL:
            self._replace(worker, timed_out(f"more than {self._limits.cpu_seconds:g} s of processor time"))
        else:
            self._replace(worker, crashed(how))

    def _replace(self, worker: _Worker, verdict: Verdict | None = None) -> None:
        """Start another process in place of one that was ended; lines without a verdict wait again.

        `verdict` is for the line it was working on.
        """
        if worker.working_on and verdict is not None:
            self._settle(worker, verdict)
        self._waiting.extendleft(reversed(worker.working_on))
        self._workers.remove(worker)
        self._start()

    def _start(self) -> None:
        worker = _Worker(self._task)
        self._workers.append(worker)
        self._selector.register(worker.lines, selectors.EVENT_READ, worker)
        self._watch(worker)

    def _pass_on(self, worker: _Worker) -> None:
        worker.lines.write()
        self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        write = selectors.EVENT_WRITE if worker.lines.has_outgoing else 0
        self._selector.modify(worker.lines, selectors.EVENT_READ | write, worker)

    def _end(self, worker: _Worker) -> None:
        if worker.lines.fileno() >= 0:
            self._selector.unregister(worker.lines)
            worker.process.end()

    def _patience(self) -> float:
        """Seconds to the next deadline."""
        now, limit = time.monotonic(), self._limits.timeout_seconds
        ends = [worker.since + limit for worker in self._workers if worker.working_on]
        ends += [worker.since + _START_SECONDS for worker in self._workers if not worker.ready]
        return max(0.0, min(ends, default=now) - now)

    def _unusable(self, reason: str) -> UserError:
        return UserError(f"{self._setting}: {reason}")


def _verdict(line: bytes) -> Verdict | None:
    """The verdict of a line, None when it is malformed."""
    try:
        score, outcome, detail = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(score, float) or not abs(score) <= MOST_REWARD:
        return None
    if outcome not in OUTCOMES or not isinstance(detail, str):
        return None
    # An error may quote half a surrogate pair, which no table can hold.
    return Verdict(score, outcome, detail[:DETAIL_CHARACTERS].encode("utf-8", "backslashreplace").decode())
