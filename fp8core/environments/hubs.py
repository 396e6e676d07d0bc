"""Environments of hubs: servers in the manner of OpenEnv, by HTTP.

    environment: {name: "fp8core.environments.hubs:OpenEnv", options: {url: "http://127.0.0.1:8000", action: message}}

The history of an episode is ours: a server only adds messages to it. Nobody can promise that an episode which is begun
again gets the same answers: the server gets the seed, and may ignore it. Records have nothing of the server's source.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn
from fp8core.errors import printable


class ServerError(Exception):
    """A server cannot be reached, or answers otherwise than agreed."""


class OpenEnv:
    """An episode on a server: `POST /reset`, `POST /step` and `GET /state` with JSON.

    The policy's text is one field of the action; tool calls are its text as well. A server must keep episodes apart, or
    be used with one at once. After every request its state must name our episode and our number of steps. A server that
    makes a new environment for every request fails at the first step, and one that is shared at the first mixture.
    """

    def __init__(
        self, *, url: str, action: str = "message", observation: str = "", columns: Sequence[str] = ()
    ) -> None:
        """Name the server.

        Args:
            url: without `/reset`.
            action: field of the action that holds the policy's text.
            observation: field of the observation that is shown; empty: all of it, as JSON.
            columns: of the task, sent with `/reset` by their names.

        Raises:
            ValueError: the address is none of HTTP.
        """
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"url={printable(url)!r} is no address of HTTP")
        self._url, self._action, self._observation, self._columns = url.rstrip("/"), action, observation, columns
        self._episode, self._steps = "", 0

    def start(self, task: Task) -> Turn | Outcome:
        self._episode = f"{task.seed:016x}"
        if lacking := [name for name in self._columns if name not in task.columns]:
            known = ", ".join(task.columns) or "none"
            raise ValueError(f"columns: the data has no column {lacking[0]!r:.60}; it has {known} (data.columns)")
        sent = {name: task.columns[name] for name in self._columns}
        answer = self._ask("/reset", {**sent, "seed": task.seed % 2**31, "episode_id": self._episode})
        asked = (Said("user", task.question),) if task.question else ()
        return self._reply(answer, (*task.before, *asked))

    def step(self, action: Action) -> Turn | Outcome:
        self._steps += 1
        return self._reply(self._ask("/step", {"action": {self._action: action.text}, "episode_id": self._episode}), ())

    def close(self) -> None:
        pass

    def _reply(self, answer: Mapping[str, Any], before: tuple[Said, ...]) -> Turn | Outcome:
        state = self._ask("/state", None)
        if (state.get("episode_id"), state.get("step_count")) != (self._episode, self._steps):
            raise ServerError(
                "its state is not that of this episode: it keeps one for all (use environment.at_once=1), or none"
            )
        if "observation" not in answer or type(answer.get("done")) is not bool:
            raise ServerError("its answer lacks `observation`, or `done` as a boolean")
        reward = float(answer.get("reward") or 0.0)
        if answer["done"]:
            return Outcome("right" if reward > 0 else "wrong", reward)
        return Turn((*before, Said("user", self._shown(answer["observation"]))), reward=reward)

    def _shown(self, observation: Any) -> str:
        if not self._observation:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        text = observation.get(self._observation) if isinstance(observation, dict) else None
        if not isinstance(text, str):
            raise ServerError(f"its observation has no text {self._observation!r}")
        return text

    def _ask(self, path: str, message: Mapping[str, Any] | None) -> dict[str, Any]:
        """Post a message, or get where there is none; how long it may take is the pool's to say."""
        query = "" if message is not None else f"?episode_id={self._episode}"
        data = None if message is None else json.dumps(message).encode()
        request = urllib.request.Request(self._url + path + query, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{path}: {error}") from error
        except ValueError as error:
            raise ServerError(f"{path} answered no JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{path} answered no object")
        return answer
