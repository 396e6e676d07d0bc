"""Verifiers in processes that are killed and replaced when they hang, crash or take too much memory.

`begin` hands out work and returns, so the processes check finished groups while the engine generates others. `verify`
waits for the rest. Equal answers are checked once. Results are dropped when `verify` returns: nothing that a record
depends on lives here.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pydantic import JsonValue

from fp8core.processes.host import Limits
from fp8core.processes.pool import Failure, PoolProcess, ProcessPool
from fp8core.rewards.scorer import Answer, Verdict

Request = tuple[str, ...]
"""An answer, or (prompt, reference) to check."""


class VerifierPool:
    """Processes that serve one scorer, each with a thread that waits for it; see Verifier. Safe for threads."""

    def __init__(self, key: str, name: str, options: Mapping[str, JsonValue], limits: Limits, workers: int) -> None:
        """Load the scorer that the setting `key` names. Raises UserError."""
        self._setting = f"{key}={name}"
        settings = {"name": name, "options": dict(options)}
        self._pool = ProcessPool(self._setting, "fp8core.rewards.scorer:serve_scorer", settings, limits)
        self._threads = ThreadPoolExecutor(workers, "verifier")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._verdicts: dict[Request, Future[Verdict]] = {}

    @property
    def main(self) -> "VerifierPool":
        return self

    def begin(self, answers: Sequence[Answer]) -> None:
        self._begun(answers)

    def verify(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._wait_for(answers)

    def faults(self, references: Sequence[tuple[str, str]]) -> list[str | None]:
        verdicts = self._wait_for(references)
        return [None if verdict.outcome == "right" else f"{self._setting}: {verdict.detail}" for verdict in verdicts]

    def describe(self) -> dict[str, JsonValue]:
        return dict(self._pool.description)

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)

    def _wait_for(self, requests: Sequence[Request]) -> list[Verdict]:
        begun = self._begun(requests)
        verdicts = [verdict.result() for verdict in begun]
        with self._lock:
            for request in requests:
                self._verdicts.pop(request, None)
        return verdicts

    def _begun(self, requests: Sequence[Request]) -> list[Future[Verdict]]:
        with self._lock:
            for request in requests:
                if request not in self._verdicts:
                    self._verdicts[request] = self._threads.submit(self._check, request)
            return [self._verdicts[request] for request in requests]

    def _check(self, request: Request) -> Verdict:
        process: PoolProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = self._pool.start()
        said = process.ask(request)
        if isinstance(said, Failure):
            self._of_thread.process = None
            return Verdict(0.0, said.outcome, said.detail)
        verdict: Verdict = said.reply
        return verdict
