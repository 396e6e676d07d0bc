"""Replies of judges, by the digests of their requests: nobody is asked again for what was answered.

Replies of the step under way are durable line by line. Its tasks make them artifacts of kind `judgements`, and its
commit lets them go here.
"""

import json
import os
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fp8core import durable
from fp8core.errors import NotRecordedError, UserError
from fp8core.rewards.scorer import Judgement


class Answers:
    """In memory. Safe for threads."""

    def __init__(self) -> None:
        self._new: dict[str, Judgement] = {}
        self._recorded: dict[str, Judgement] = {}
        self._lock = threading.Lock()

    def find(self, request: str) -> Judgement | None:
        with self._lock:
            return self._recorded.get(request) or self._new.get(request)

    def add(self, judgement: Judgement) -> None:
        with self._lock:
            self._new[judgement.request] = judgement

    def recall(self, judgements: Iterable[Judgement]) -> None:
        """Those of a step that is made again."""
        with self._lock:
            self._recorded |= {judgement.request: judgement for judgement in judgements}

    def forget(self, requests: Collection[str] | None = None) -> None:
        """At the end of a step that has these in its artifacts; None: all, as no step has them."""
        with self._lock:
            self._recorded.clear()
            for request in [*self._new] if requests is None else requests:
                self._new.pop(request, None)


class RecordedAnswers(Answers):
    """Of a replay, which sends no request."""

    def find(self, request: str) -> Judgement:
        if (judgement := super().find(request)) is None:
            raise NotRecordedError("a judge was not asked about this completion in this step, so no reply is recorded")
        return judgement


class AnswerLog(Answers):
    """Of a run: a file with a line for each new answer."""

    def __init__(self, path: Path) -> None:
        """A torn last line is removed. Raises UserError: the disk."""
        super().__init__()
        self._path = path
        try:
            lines, end = durable.read_lines(path)
            os.truncate(path, end)
        except FileNotFoundError:
            return
        except OSError as error:
            raise durable.unwritable(path, error) from error
        for line in lines:
            # A line that cannot be read counts as no answer.
            with suppress(ValueError, TypeError):
                super().add(Judgement(*json.loads(line)))

    def add(self, judgement: Judgement) -> None:
        """Raises UserError: the disk."""
        line = f"{json.dumps(judgement)}\n".encode()
        with self._lock:
            try:
                is_new = not self._path.exists()
                with FileIO(self._path, "a") as file:
                    durable.append_durably(file, line)
                if is_new:
                    durable.sync_path(self._path.parent)
            except OSError as error:
                raise UserError(f"cannot append to {self._path}: {durable.write_problem(error)}") from error
            self._new[judgement.request] = judgement

    def forget(self, requests: Collection[str] | None = None) -> None:
        super().forget(requests)
        with self._lock:
            if self._new:
                lines = "".join(f"{json.dumps(judgement)}\n" for judgement in self._new.values())
                durable.write_file(self._path, lines.encode())
            else:
                self._path.unlink(missing_ok=True)
