"""Verifiers, in this process or in others that are killed when they hang or crash, as a configuration names them."""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType

from pydantic import JsonValue

from fp8core.config.reward import FormatOptions, JudgeOptions, RewardConfig, RewardModelOptions
from fp8core.errors import UserError
from fp8core.processes.pool import Failure, Limits, PoolProcess, ProcessPool
from fp8core.rewards.answers import Answers
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.scorer import RIGHT, Scorer, ScoreRequest, SideScore, Verdict, unparsed_answer, wrong

MARKER = "#"
_IN_PROCESS = ("chain", "integer", "format", "judge", "reward_model")
_NUMBER = re.compile(r"[0-9]{1,3}")


class ChainVerifier(Scorer):
    """Right when a finished completion's text after the last `#` is the answer to the digit."""

    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        self.check(prompt, answer)
        _, marker, prediction = completion.rpartition(MARKER)
        if not marker:
            return unparsed_answer(f"no {MARKER}")
        if finish != "stop":
            return unparsed_answer("cut off before the end of sequence")
        if len(prediction) != len(answer) or not _NUMBER.fullmatch(prediction):
            digits = "one digit" if len(answer) == 1 else f"{len(answer)} digits"
            return unparsed_answer(f"the text after {MARKER} is not {digits}")
        return RIGHT if prediction == answer else wrong(f"answer {prediction}")

    def check(self, prompt: str, answer: str) -> None:
        if not _NUMBER.fullmatch(answer):
            raise UserError(f"the reference of {prompt[:60]!r} is {answer[:60]!r}, not one to three digits")


class FormatVerifier(Scorer):
    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tags

    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        text = self._start(prompt) + completion
        places = [text.find(tag) for tag in self._tags]
        once = all(text.count(tag) == 1 for tag in self._tags)
        return RIGHT if finish == "stop" and once and places == sorted(places) else wrong("")

    def _start(self, prompt: str) -> str:
        """The tags that the chat template has written at the end of the prompt, for the completion to go on from."""
        tags = ""
        rest = prompt.rstrip()
        while tag := next((tag for tag in self._tags if rest.endswith(tag)), ""):
            tags = tag + tags
            rest = rest.removesuffix(tag).rstrip()
        return tags


class Verifier(ABC):
    """The scoring of a run. Nothing a completion holds is an error."""

    @property
    def main(self) -> "Verifier":
        """That of `reward.verifier` alone, whose verdicts are the outcomes and the held-out accuracy."""
        return self

    def begin(self, requests: Sequence[ScoreRequest]) -> None:
        """Start to check answers that `verify` will get soon. Returns at once."""
        return

    @abstractmethod
    def verify(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """One verdict an answer, in their order. Raises UserError on an answer of the data that it cannot read."""

    @abstractmethod
    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        """The data's mistake in each (prompt, answer) of a source; None where there is none."""

    @abstractmethod
    def describe(self) -> dict[str, JsonValue]:
        """Its name, and the versions or the digest of its code."""

    def close(self) -> None:
        """End its processes; a second call does nothing."""
        return


class InProcess(Verifier):
    """A verifier for a scorer that can neither hang nor crash; `key`: the setting that names it."""

    def __init__(self, name: str, scorer: Scorer, key: str = "reward.verifier") -> None:
        self._name = name
        self._scorer = scorer
        self._setting = f"{key}={name}"

    def verify(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        try:
            return [self._scorer.score(*request.for_scorer) for request in requests]
        except UserError as error:
            raise UserError(f"{self._setting}: {error}") from error

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        return [self._fault(*answer) for answer in answers]

    def _fault(self, prompt: str, answer: str) -> str | None:
        try:
            self._scorer.check(prompt, answer)
        except UserError as error:
            return f"{self._setting}: {error}"
        return None

    def describe(self) -> dict[str, JsonValue]:
        return {"verifier": self._name}


Request = tuple[str, ...]
"""A completion to score, or (prompt, answer) to check."""


class ConcurrentVerifier(Verifier):
    """Checks answers while the engine generates. Equal ones are checked once. Safe for threads."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        self._verdicts: dict[Request, Future[Verdict]] = {}

    @abstractmethod
    def _submit(self, request: Request) -> "Future[Verdict]": ...

    def begin(self, requests: Sequence[ScoreRequest]) -> None:
        self._start(requests)

    def verify(self, requests: Sequence[Request]) -> list[Verdict]:
        verdicts = [verdict.result() for verdict in self._start(requests)]
        with self._lock:
            for request in requests:
                self._verdicts.pop(request, None)
        return verdicts

    def _start(self, requests: Sequence[Request]) -> list[Future[Verdict]]:
        with self._lock:
            for request in requests:
                if request not in self._verdicts:
                    self._verdicts[request] = self._submit(request)
            return [self._verdicts[request] for request in requests]


class VerifierPool(ConcurrentVerifier):
    def __init__(self, key: str, name: str, options: Mapping[str, JsonValue], limits: Limits, workers: int) -> None:
        super().__init__(f"{key}={name}")
        settings = {"name": name, "options": dict(options)}
        self._pool = ProcessPool(self._setting, "fp8core.rewards.scorer:serve_scorer", settings, limits)
        self._threads = ThreadPoolExecutor(workers, "verifier")
        self._of_thread = threading.local()

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        verdicts = self.verify(answers)
        return [None if verdict.outcome == "right" else f"{self._setting}: {verdict.detail}" for verdict in verdicts]

    def describe(self) -> dict[str, JsonValue]:
        return dict(self._pool.description)

    def close(self) -> None:
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)

    def _submit(self, request: Request) -> Future[Verdict]:
        return self._threads.submit(self._check, request)

    def _check(self, request: Request) -> Verdict:
        process: PoolProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = self._pool.start()
        reply, _ = process.ask(request)
        if isinstance(reply, Failure):
            self._of_thread.process = None
            return Verdict(0.0, reply.outcome, reply.detail)
        verdict: Verdict = reply
        return verdict


class SourceVerifiers(Verifier):
    """The verifier of each data source; several sources may share one."""

    def __init__(self, by_source: Mapping[str, Verifier]) -> None:
        self._by_source = by_source

    def begin(self, requests: Sequence[ScoreRequest]) -> None:
        for name, verifier in self._by_source.items():
            verifier.begin([request for request in requests if request.source == name])

    def verify(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        self.begin(requests)
        verdicts = {
            name: iter(verifier.verify([request for request in requests if request.source == name]))
            for name, verifier in self._by_source.items()
        }
        return [next(verdicts[request.source]) for request in requests]

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        return self._by_source[source].faults(answers)

    def describe(self) -> dict[str, JsonValue]:
        sources = {name: verifier.describe() for name, verifier in self._by_source.items()}
        names = dict.fromkeys(str(source["verifier"]) for source in sources.values())
        return {"verifier": ", ".join(names), "sources": {**sources}}

    def close(self) -> None:
        for verifier in self._by_source.values():
            verifier.close()


class WeightedVerifiers(Verifier):
    """A verifier whose verdicts carry the scores of others, each with a name and a weight."""

    def __init__(self, main: Verifier, others: Sequence[tuple[str, float, Verifier]]) -> None:
        self._main = main
        self._others = others
        self._all = [main, *(verifier for _, _, verifier in others)]

    @property
    def main(self) -> Verifier:
        return self._main

    def begin(self, requests: Sequence[ScoreRequest]) -> None:
        for verifier in self._all:
            verifier.begin(requests)

    def verify(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        verdicts = self._main.verify(requests)
        for name, weight, verifier in self._others:
            other_verdicts = verifier.verify(requests)
            failures = [verdict for verdict in other_verdicts if verdict.outcome in ("timeout", "crashed")]
            for place, (verdict, other) in enumerate(zip(verdicts, other_verdicts, strict=True)):
                detail = verdict.detail
                if other in failures:
                    detail = "; ".join(filter(None, (detail, f"{name}: {other.detail}")))
                side_scores = (*verdict.side_scores, SideScore(name, other.score, weight, other.outcome))
                judgements = (*verdict.judgements, *other.judgements)
                verdicts[place] = replace(verdict, side_scores=side_scores, detail=detail, judgements=judgements)
        return verdicts

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        by_answer = zip(*(verifier.faults(answers, source) for verifier in self._all), strict=True)
        return [next(filter(None, faults), None) for faults in by_answer]

    def describe(self) -> dict[str, JsonValue]:
        others: dict[str, JsonValue] = {name: verifier.describe() for name, _, verifier in self._others}
        return {**self._main.describe(), "others": others}

    def close(self) -> None:
        for verifier in self._all:
            verifier.close()


def reward_of(verdict: Verdict) -> float:
    """The score, and the weighted scores of other verifiers."""
    if not verdict.side_scores:
        return verdict.score
    return verdict.score + sum(part.weight * part.score for part in verdict.side_scores)


def build_verifier(
    config: RewardConfig, by_source: Mapping[str, RewardConfig] = MappingProxyType({}), answers: Answers | None = None
) -> Verifier:
    """`answers`: those that judges gave.

    Raises UserError: what a verifier needs is not installed, a function cannot be imported or called so, or a judge
    does not answer."""
    answers = Answers() if answers is None else answers
    main = _verifier_of_sources(config, by_source, answers) if by_source else _one_verifier(config, "reward", answers)
    others = list[tuple[str, float, Verifier]]()
    for other in config.others:
        other_config = config.model_copy(update={"verifier": other.verifier, "options": other.options})
        built = _one_verifier(other_config, f"reward.others.{other.name}", answers)
        others.append((other.name, other.weight, built))
    return WeightedVerifiers(main, others) if others else main


def _verifier_of_sources(
    config: RewardConfig, by_source: Mapping[str, RewardConfig], answers: Answers
) -> SourceVerifiers:
    """Sources with equal settings share a verifier, and all verifiers share `reward.workers`."""
    rewards = [*by_source.values()]
    different = [each for i, each in enumerate(rewards) if each not in rewards[:i]]
    pools = [each for each in different if each.verifier not in _IN_PROCESS]
    workers = max(1, config.workers // max(1, len(pools)))
    verifiers = list[Verifier]()
    for one in different:
        name = next(name for name, each in by_source.items() if each == one)
        section = "reward" if one == config else f"data.{name}"
        verifiers.append(_one_verifier(one.model_copy(update={"workers": workers}), section, answers))
    return SourceVerifiers({name: verifiers[different.index(each)] for name, each in by_source.items()})


def _one_verifier(config: RewardConfig, section: str, answers: Answers) -> Verifier:
    key = f"{section}.verifier"
    if config.verifier == "chain":
        return InProcess("chain", ChainVerifier(), key)
    if config.verifier == "integer":
        return InProcess("integer", IntegerVerifier(), key)
    if config.verifier == "format":
        return InProcess("format", FormatVerifier(FormatOptions.model_validate(config.options).tags), key)
    if config.verifier == "judge":
        # Its library takes as long to import as most verifiers together.
        from fp8core.rewards.judge import Judge

        return Judge(section, JudgeOptions.model_validate(config.options), answers)
    if config.verifier == "reward_model":
        from fp8core.rewards.reward_model import RewardModel

        return RewardModel(section, RewardModelOptions.model_validate(config.options))
    if config.verifier == "math-verify" and find_spec("math_verify") is None:
        raise UserError(f"{key}=math-verify: it is not installed (pip install 'fp8-grpo[math]')")
    limits = Limits(config.timeout_seconds, config.memory_mb)
    return VerifierPool(key, config.verifier, config.options, limits, config.workers)
