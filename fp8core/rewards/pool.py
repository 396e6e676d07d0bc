"""Verifiers in child processes that are killed and replaced when they hang, crash or take too much memory.

A pool is used by blocking calls and has no thread: it moves when it is called. `begin` hands out work and returns, so
the children check finished groups while the engine generates others; `verify` waits for the rest. Equal answers are
checked once. What was checked is forgotten when `verify` returns: nothing that a record depends on lives here.
"""

import json
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from fp8core.errors import UserError
from fp8core.rewards.child import DETAIL_CHARACTERS
from fp8core.rewards.scorer import Answer
from fp8core.rewards.verdict import OUTCOMES, Verdict, crashed, timed_out
from fp8core.rewards.worker_process import WorkerProcess, ending, took_too_much_time

Line = tuple[str, ...]
"""An answer, or (prompt, reference) to check."""

_START_SECONDS = 120.0
_LARGEST_BATCH = 64


class Limits(NamedTuple):
    """Of one answer: seconds, seconds of processor time, and memory (MiB) beyond what the loaded scorer takes."""

    timeout_seconds: float
    cpu_seconds: float
    memory_mb: int


class VerifierPool:
    """A resident pool of processes that serve one scorer; see Verifier. Safe for threads, which wait in turn."""

    def __init__(self, name: str, options: Mapping[str, JsonValue], limits: Limits, workers: int) -> None:
        """Start `workers` processes, and wait until they have loaded the scorer.

        Raises:
            UserError: they cannot.
        """
        self._name = name
        self._limits = limits
        self._task = {"name": name, "options": dict(options), **limits._asdict()}
        self._lock = threading.Lock()
        self._waiting: deque[Line] = deque()
        self._verdicts: dict[Line, Verdict] = {}
        self._known: set[Line] = set()
        self._description: dict[str, str] | None = None
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        try:
            for _ in range(workers):
                self._start()
            while not all(worker.ready for worker in self._workers):
                self._move(self._patience())
        except BaseException:
            self.close()
            raise

    def begin(self, answers: Sequence[Answer]) -> None:
        with self._lock:
            self._enqueue(answers)
            self._move(0)

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._wait_for(answers)

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        verdicts = self._wait_for(references)
        return [None if verdict.outcome == "right" else verdict.detail for verdict in verdicts]

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
        """Hand out work, wait at most so long for an event, take in verdicts, and replace who is late or dead."""
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

    def _take_in(self, worker: WorkerProcess) -> None:
        lines, ended = worker.read()
        for line in lines:
            if not worker.ready:
                self._admit(worker, line)
            elif not worker.working_on or (verdict := _verdict(line)) is None:
                self._end(worker)
                self._replace(worker, crashed("something else was written to the verifier's channel"))
                return
            else:
                self._settle(worker, verdict)
        if ended:
            self._bury(worker)

    def _admit(self, worker: WorkerProcess, line: bytes) -> None:
        message = json.loads(line)
        if "failed" in message:
            raise self._unusable(message["failed"])
        worker.description = message["loaded"]
        if self._description not in (None, worker.description):
            raise self._unusable(f"it changed while it was used: {self._description}, now {worker.description}")
        self._description = worker.description

    def _settle(self, worker: WorkerProcess, verdict: Verdict) -> None:
        self._verdicts[worker.working_on.popleft()] = verdict
        worker.since = time.monotonic()

    def _bury(self, worker: WorkerProcess) -> None:
        """Replace a process that ended by itself."""
        code = self._end(worker)
        if not worker.ready:
            raise self._unusable(f"its process ended before it was ready ({ending(code)})")
        how = crashed(f"its process ended ({ending(code)})")
        if took_too_much_time(code):
            how = timed_out(f"more than {self._limits.cpu_seconds:g} s of processor time")
        self._replace(worker, how)

    def _replace(self, worker: WorkerProcess, verdict: Verdict) -> None:
        """Start another process in place of one that was ended; its answer gets a verdict, those behind wait again."""
        if worker.working_on:
            self._settle(worker, verdict)
        self._waiting.extendleft(reversed(worker.working_on))
        self._workers.remove(worker)
        self._start()

    def _start(self) -> None:
        worker = WorkerProcess(self._task)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._watch(worker)

    def _pass_on(self, worker: WorkerProcess) -> None:
        worker.write()
        self._watch(worker)

    def _watch(self, worker: WorkerProcess) -> None:
        write = selectors.EVENT_WRITE if worker.has_outgoing else 0
        self._selector.modify(worker.channel, selectors.EVENT_READ | write, worker)

    def _end(self, worker: WorkerProcess) -> int:
        if not worker.ended:
            self._selector.unregister(worker.channel)
        return worker.end()

    def _patience(self) -> float:
        """Seconds to the next deadline."""
        now, limit = time.monotonic(), self._limits.timeout_seconds
        ends = [worker.since + limit for worker in self._workers if worker.working_on]
        ends += [worker.since + _START_SECONDS for worker in self._workers if not worker.ready]
        return max(0.0, min(ends, default=now) - now)

    def _unusable(self, reason: str) -> UserError:
        return UserError(f"reward.verifier={self._name}: {reason}")


def _verdict(line: bytes) -> Verdict | None:
    """The verdict of a line, None when it is none: what a child says is not believed unseen."""
    try:
        score, outcome, detail = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(score, float) or not math.isfinite(score):
        return None
    if outcome not in OUTCOMES or not isinstance(detail, str):
        return None
    # An error may quote half a surrogate pair, which no table can hold.
    return Verdict(score, outcome, detail[:DETAIL_CHARACTERS].encode("utf-8", "backslashreplace").decode())
