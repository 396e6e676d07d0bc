"""Verifiers in processes that are killed and replaced when they hang, crash or take too much memory.

`begin` hands out work and returns, so the processes check finished groups while the engine generates others. `verify`
waits for the rest. Equal answers are checked once. Results are dropped when `verify` returns: nothing that a record
depends on lives here.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue

from fp8core.processes.host import Limits
from fp8core.processes.pool import Answer as ProcessAnswer
from fp8core.processes.pool import PoolProcess, ProcessPool
from fp8core.rewards.scorer import Answer, Verdict

_LARGEST_BATCH = 64
_BATCH_CHARACTERS = 1 << 14
"""What is sent at once fits into a socket's buffer, so that no process keeps this one waiting."""
Request = tuple[str, ...]
"""An answer, or (prompt, reference) to check."""


class VerifierPool:
    """Processes that serve one scorer; see Verifier. Safe for threads, which wait in turn."""

    def __init__(
        self, key: str, name: str, options: Mapping[str, JsonValue], limits: Limits, workers: int, columns: bool
    ) -> None:
        """Load the scorer; `workers` processes check answers.

        `key` is the setting that names it; `columns` as of `load_scorer`.

        Raises:
            UserError: it cannot be loaded.
        """
        self._setting, self._workers = f"{key}={name}", workers
        self._lock = threading.Lock()
        self._waiting = deque[Request]()
        self._verdicts: dict[Request, Verdict] = {}
        self._known = set[Request]()
        settings = {"name": name, "options": dict(options), "columns": columns}
        self._pool = ProcessPool(self._setting, "fp8core.rewards.scorer:serve_scorer", settings, limits)

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
        return dict(self._pool.description)

    def close(self) -> None:
        with self._lock:
            self._pool.close()

    def _wait_for(self, requests: Sequence[Request]) -> list[Verdict]:
        with self._lock:
            self._enqueue(requests)
            while any(request not in self._verdicts for request in requests):
                self._move(math.inf)
            verdicts = [self._verdicts[request] for request in requests]
            self._known -= self._verdicts.keys()
            self._verdicts.clear()
            return verdicts

    def _enqueue(self, requests: Iterable[Request]) -> None:
        new = [request for request in dict.fromkeys(map(tuple, requests)) if request not in self._known]
        self._known.update(new)
        self._waiting.extend(new)

    def _move(self, seconds: float) -> None:
        """Hand out work, wait at most so long for a verdict, and replace processes that ended."""
        while self._waiting and len(self._pool.processes) < self._workers:
            self._give(self._pool.start())
        for process in self._pool.processes:
            if not process.pending:
                self._give(process)
        for process, said in self._pool.wait(seconds):
            if isinstance(said, ProcessAnswer):
                self._verdicts[said.request] = said.reply
            elif process.pending:
                first, *behind = process.pending
                self._verdicts[first] = Verdict(0.0, said.outcome, said.detail)
                self._waiting.extendleft(reversed(behind))

    def _give(self, process: PoolProcess) -> None:
        # Small enough that no process is left with much while the others have nothing.
        most = min(_LARGEST_BATCH, math.ceil(len(self._waiting) / (2 * self._workers)))
        characters = 0
        while self._waiting and len(process.pending) < most:
            characters += sum(map(len, self._waiting[0]))
            if process.pending and characters > _BATCH_CHARACTERS:
                return
            process.ask(self._waiting.popleft())
