"""A judge: a model behind an OpenAI-compatible server scores finished completions.

Requests are concurrent on a thread of the judge's own. Each reply is durable before it counts (`rewards.answers`).
"""

import asyncio
import hashlib
import json
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
from pydantic import JsonValue

from fp8core.config.reward import PLACEHOLDER, JudgeOptions
from fp8core.errors import UserError, first_line, printable, whole_characters
from fp8core.processes.variables import secret
from fp8core.rewards import scorer
from fp8core.rewards.answers import Answers, RecordedAnswers
from fp8core.rewards.verifier import ConcurrentVerifier, Request

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0
_ALL_REQUESTS_FAIL = (401, 403, 404)
_TRIAL_RETRIES = 2
_SAID_CHARACTERS = 150


class Judge(ConcurrentVerifier):
    """`section`: of the configuration, which has it and its options."""

    def __init__(self, section: str, options: JudgeOptions, answers: Answers) -> None:
        """Raises UserError: the key is not set, or the server does not answer. A replay sends no request."""
        super().__init__(f"{section}.verifier=judge")
        self._options = options
        self._section = section
        self._answers = answers
        self._pattern = re.compile(options.pattern)
        self._room = asyncio.Semaphore(options.concurrency)
        may_ask = not isinstance(answers, RecordedAnswers)
        variable = options.key_variable if may_ask else None
        self._secret = None if variable is None else secret(variable, f"{section}.options.key_variable")
        headers = {} if self._secret is None else {"Authorization": f"Bearer {self._secret}"}
        limits = httpx.Limits(max_connections=options.concurrency)
        self._client = httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        if may_ask:
            try:
                self._try_out()
            except BaseException:
                self.close()
                raise

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        return [None] * len(answers)

    def describe(self) -> dict[str, JsonValue]:
        return {"verifier": "judge", "url": self._options.url, "model": self._options.model}

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        asking = asyncio.all_tasks() - {asyncio.current_task()}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._client.aclose()

    def _submit(self, request: Request) -> "Future[scorer.Verdict]":
        assert isinstance(request, scorer.ScoreRequest), "no reference is checked"
        return asyncio.run_coroutine_threadsafe(self._verdict(request), self._loop)

    async def _verdict(self, request: scorer.ScoreRequest) -> scorer.Verdict:
        if request.finish != "stop":
            return scorer.unparsed_answer("cut off before the end of sequence")
        body = self._body(message_text(self._options.template, request))
        content = json.dumps({"url": self._options.url, **body}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        judgement = self._answers.find(digest)
        if judgement is None:
            async with self._room:
                judgement = await self._ask(digest, body, self._options.retries)
            if judgement.outcome not in ("timeout", "crashed"):
                self._answers.add(judgement)
        return self._verdict_of(judgement)

    def _try_out(self) -> None:
        """Raises UserError: the server does not answer, or refuses the key, the model or a field of the request."""
        body = self._body("Reply with one word.")
        trial = asyncio.run_coroutine_threadsafe(self._ask("", body, _TRIAL_RETRIES), self._loop).result()
        if trial.outcome in ("timeout", "crashed"):
            raise UserError(f"{self._setting}: {self._options.url} does not answer: {trial.detail}")

    def _body(self, text: str) -> dict[str, JsonValue]:
        options = self._options
        body: dict[str, JsonValue] = {
            "model": options.model,
            "messages": [{"role": "user", "content": whole_characters(text)}],
            "temperature": 0.0,
            "max_tokens": options.max_tokens,
            **options.body,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def _ask(self, digest: str, body: Mapping[str, JsonValue], retries: int) -> scorer.Judgement:
        """Raises UserError: the server would refuse every request."""
        outcome: scorer.VerdictOutcome = "crashed"
        seconds = self._options.timeout_seconds
        for attempt in range(retries + 1):
            asked_wait = 0.0
            try:
                async with asyncio.timeout(seconds):
                    response = await self._client.post("chat/completions", json=body)
            except TimeoutError:
                outcome, detail = "timeout", f"no reply after {seconds:g} s"
            except httpx.RequestError as error:
                outcome, detail = "crashed", f"{type(error).__name__}: {first_line(error)}"
            else:
                if response.is_success:
                    return self._judgement(digest, response)
                problem = self._public(_problem(response))[: scorer.DETAIL_CHARACTERS]
                outcome, detail = "crashed", f"HTTP {response.status_code}: {problem}"
                if response.status_code in _ALL_REQUESTS_FAIL:
                    raise UserError(f"{self._setting}: {self._options.url}: {detail}; {self._cure(response)}")
                if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                    break
                wait_header = response.headers.get("Retry-After", "")
                asked_wait = float(wait_header) if wait_header.isdecimal() else 0.0
            if attempt < retries:
                # Not all at once.
                wait = _FIRST_WAIT_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(wait, asked_wait), _LONGEST_WAIT_SECONDS))
        return scorer.Judgement(digest, "", 0.0, outcome, self._public(detail)[: scorer.DETAIL_CHARACTERS])

    def _judgement(self, digest: str, response: httpx.Response) -> scorer.Judgement:
        try:
            reply = response.json()["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError):
            return scorer.Judgement(digest, "", 0.0, "crashed", "the reply is no chat completion")
        return self._read(digest, self._public(whole_characters(str(reply))))

    def _read(self, digest: str, reply: str) -> scorer.Judgement:
        options = self._options
        said = printable(" ".join(reply.split()))[:_SAID_CHARACTERS]
        groups = [match[1] for match in self._pattern.finditer(reply)]
        try:
            score = float(groups[-1])
        except (IndexError, TypeError, ValueError):
            return scorer.Judgement(digest, reply, 0.0, "unparsed", f"no score in {said!r}")
        if not options.lowest <= score <= options.highest:
            return scorer.Judgement(digest, reply, 0.0, "unparsed", f"{score:g} is not a score: {said}")
        reward = (score - options.lowest) / (options.highest - options.lowest)
        is_right = score >= options.least_right
        detail = "" if is_right else f"score {score:g}: {said}"
        return scorer.Judgement(digest, reply, reward, "right" if is_right else "wrong", detail)

    def _verdict_of(self, judgement: scorer.Judgement) -> scorer.Verdict:
        # A stored reply is read again: the record shows what the pattern makes of it.
        if judgement.outcome not in ("timeout", "crashed"):
            judgement = self._read(judgement.request, judgement.reply)
        return scorer.Verdict(judgement.score, judgement.outcome, judgement.detail, judgements=(judgement,))

    def _public(self, text: str) -> str:
        return text if self._secret is None else text.replace(self._secret, "***")

    def _cure(self, response: httpx.Response) -> str:
        if response.status_code == httpx.codes.NOT_FOUND:
            return (
                f"set {self._section}.options.url to the part before /chat/completions, and model to one that it serves"
            )
        variable = self._options.key_variable
        if variable is None:
            return f"name the variable with its key in {self._section}.options.key_variable"
        return f"set {variable} to a key that it takes"


def message_text(template: str, request: scorer.ScoreRequest) -> str:
    """The template with the fields of a request; what they hold is not replaced again."""
    fields: dict[str, Any] = json.loads(request.columns or "{}")
    fields |= {"answer": request.answer, "completion": request.completion}
    fields["question"] = request.conversation[-1][1]
    return PLACEHOLDER.sub(lambda match: str(fields[match[1]]), template)


def _problem(response: httpx.Response) -> str:
    """The server's message in a line."""
    try:
        content = response.json()
        error = content.get("error", content)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, AttributeError):
        text = response.text or response.reason_phrase
    return printable(" ".join(text.split()))
