"""The process of an episode: it makes the environment, passes tasks and actions on, and closes it.

An exception of the environment becomes an outcome of its episode, and so does a reply that is none.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8core.environments.loading import LoadedEnvironment, load_environment
from fp8core.environments.protocol import Action, Environment, Outcome, Task, Turn
from fp8core.environments.replies import checked_reply
from fp8core.errors import UserError, described_error, whole_characters
from fp8core.processes.host import Service
from fp8core.rewards.scorer import DETAIL_CHARACTERS


class Trial(NamedTuple):
    """A request to make an environment and close it; the reply is the failure, or an empty text."""


def serve_environment(settings: Mapping[str, Any]) -> Service:
    """The service of a pool of environments (`processes.host`); settings: `name`, `options` and `reply_bytes`."""
    loaded = load_environment(settings["name"], settings["options"])
    return Service(loaded.description, lambda: EpisodeHandler(loaded, settings["reply_bytes"]))


class EpisodeHandler:
    """Answers a `Task` and then every `Action`, or a `Trial`."""

    def __init__(self, loaded: LoadedEnvironment, reply_bytes: int) -> None:
        self._loaded, self._reply_bytes = loaded, reply_bytes
        self._environment: Environment | None = None
        self.finished = False

    def answer(self, request: Task | Action | Trial) -> Turn | Outcome | str:
        if isinstance(request, Trial):
            self.finished = True
            return self._tried()
        try:
            reply = checked_reply(self._asked(request), isinstance(request, Task), self._reply_bytes)
            if isinstance(reply, Outcome):
                self.close()
        except BaseException as error:  # noqa: BLE001 - the outcome says what was raised
            detail = described_error(error, self._loaded.file)[:DETAIL_CHARACTERS]
            reply = Outcome("crashed", detail=whole_characters(detail))
        self.finished = isinstance(reply, Outcome)
        return reply

    def close(self) -> None:
        """Close the environment, unless it was closed or never made."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _asked(self, request: Task | Action) -> Turn | Outcome:
        if isinstance(request, Task):
            _seed(request.seed)
            self._environment = self._loaded.create()
            return self._environment.start(request)
        assert self._environment is not None, "an action follows a turn"
        return self._environment.step(request)

    def _tried(self) -> str:
        """The fault of the options, or of the methods of the environment that they make; empty without one."""
        try:
            made = self._loaded.create()
            for name in ("start", "step", "close"):
                if not callable(getattr(made, name, None)):
                    return f"it makes {type(made).__name__}, which has no method {name}"
        except UserError as error:
            return str(error)
        except BaseException as error:  # noqa: BLE001 - the pool says what was raised
            return described_error(error, self._loaded.file)
        # Closed after the reply: whatever that raises may be about what `start` makes.
        self._environment = made
        return ""


def _seed(seed: int) -> None:
    """All episodes are forked from one process: without this they would draw the same numbers."""
    # Seeds of earlier versions had a sign, which `random` ignores: older episodes are played again with their numbers.
    random.seed(min(seed, 2**64 - seed))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
