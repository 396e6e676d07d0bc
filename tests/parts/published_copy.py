"""A copy of a finished training, which tests publish to MLflow: in their process, or in one that dies on the way."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient

from flows.tracking.session import Session, open_session
from fp8core.config.run import RunConfig
from fp8core.report.console import Console

KILLED = 9


class Copy(NamedTuple):
    """A copy of the finished training, and the configuration that publishes it to an experiment of its own."""

    config: RunConfig
    folder: Path

    @contextmanager
    def session(self) -> Iterator[tuple[Session, io.StringIO]]:
        out = io.StringIO()
        with open_session(self.config, self.folder.name, Console(out, self.config.steps), {}) as session:
            session.follow_ledger()
            yield session, out

    def publish(self) -> str:
        """Open a training whose steps are done, and close it; returns what the console said after its header."""
        with self.session() as (session, out):
            session.add_result()
        _, *lines = out.getvalue().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("  "))


def publish_until(copy: Copy, write: str) -> None:
    """The main function of a process: publish, and die right after the first call of this method of MLflow's client."""
    original = getattr(MlflowClient, write)

    def last_call(*given: Any, **named: Any) -> None:
        original(*given, **named)
        os._exit(KILLED)

    setattr(MlflowClient, write, last_call)
    copy.publish()
