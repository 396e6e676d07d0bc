"""Environments of hubs: servers in the manner of OpenEnv, by HTTP.

    environment: {name: "fp8core.environments.hubs:OpenEnv", options: {url: "http://127.0.0.1:8000", action: message}}

The history of an episode is ours: a server only adds messages to it, and cannot rewrite earlier turns. Nobody can
promise that an episode which is begun again gets the same answers: the server gets the seed, and may ignore it. The
description in records has the digest of this file, and nothing of the server's source.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPMessage
from typing import IO, Any

from fp8core.environments.protocol import Action, Outcome, Said, Task, Turn
from fp8core.errors import printable

_LONGEST_ANSWER = 1 << 20


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
            ValueError: the address is none of HTTP, or another option is no text or list of texts.
        """
        if not isinstance(url, str):
            raise ValueError(f"url={url!r:.60} is no text")
        if isinstance(columns, str):
            raise ValueError(f"columns={columns!r:.60} is no list of texts")
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise ValueError(f"url={printable(url)!r} is no address of HTTP")
        self._url, self._action, self._observation, self._columns = url.rstrip("/"), action, observation, columns
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._episode, self._steps = "", 0

    def start(self, task: Task) -> Turn | Outcome:
        self._episode = f"{task.seed:016x}"
        if lacking := [name for name in self._columns if name not in task.columns]:
            raise ValueError(
                f"columns: the data has no column {lacking[0]!r:.60}; it has {', '.join(task.columns) or 'none'} "
                "(data.columns)"
            )
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
        reward = answer.get("reward")
        reward = 0.0 if reward is None else float(reward)
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
        request = urllib.request.Request(
            self._url + path + query,
            data=None if message is None else json.dumps(message).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request) as response:
                content = response.read(_LONGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{path}: {error}") from error
        if len(content) > _LONGEST_ANSWER:
            raise ServerError(f"{path} answered more than {_LONGEST_ANSWER:,} bytes")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{path} answered no JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{path} answered no object")
        return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The server that is named is the one that is asked."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None
