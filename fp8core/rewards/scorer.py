"""Verdicts on completions, and the scorers that give them: `math-verify`, or a function of the user's own.

Imported by the processes of pools, hence free of everything heavy.
"""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal, NamedTuple, get_args

from fp8core.errors import InvalidReply, UserError, described_error, whole_characters
from fp8core.processes.pool import Service
from fp8core.user_code import check_call, file_of, find_neighbours, load_code

VerdictOutcome = Literal["right", "wrong", "unparsed", "timeout", "crashed"]
OUTCOMES: tuple[VerdictOutcome, ...] = get_args(VerdictOutcome)
Key = tuple[int, int]
"""Group and sample of a completion or an episode."""


class SideScore(NamedTuple):
    """The score of a verifier beside the main one, its weight in the reward, and why the score was given."""

    name: str
    score: float
    weight: float
    outcome: VerdictOutcome


class Judgement(NamedTuple):
    """A judge's reply to a request, which is its SHA-256, and what was read in it; a timeout or crash has no reply."""

    request: str
    reply: str
    score: float
    outcome: VerdictOutcome
    detail: str


@dataclass(frozen=True)
class Verdict:
    """The score of an answer, a detail for people (empty when right), and the scores of further verifiers.

    `judgements`: of the judges among these verifiers.
    """

    score: float
    outcome: VerdictOutcome
    detail: str
    side_scores: tuple[SideScore, ...] = ()
    judgements: tuple[Judgement, ...] = ()


RIGHT = Verdict(1.0, "right", "")
DETAIL_CHARACTERS = 200
"""The longest detail of a verdict or an outcome that a table keeps."""
MOST_REWARD = 1e9
"""The largest in absolute value: squares of advantages stay within FP32."""


def wrong(detail: str) -> Verdict:
    return Verdict(0.0, "wrong", detail)


def unparsed_answer(detail: str) -> Verdict:
    return Verdict(0.0, "unparsed", detail)


def scorer_crash(detail: str) -> Verdict:
    return Verdict(0.0, "crashed", detail)


MATH_VERIFY = "math-verify"
_MATH_LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy")


class ScoreRequest(NamedTuple):
    """A completion (without end of sequence), what it answers, and how it ended: "stop" or, cut off, "length".

    `columns`: other columns of the prompt's row (`data.columns`) as a JSON object; empty where none are configured.
    `source`: where `data` is a list, the name of the prompt's source.
    `messages`: of the prompt, as JSON (`messages_of`); empty where nobody reads them.
    """

    prompt: str
    completion: str
    answer: str
    finish: str
    columns: str = ""
    source: str = ""
    messages: str = ""

    @property
    def for_scorer(self) -> tuple[str, ...]:
        return self[:5]

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """Role and content of the messages of the prompt; the last one has the question."""
        messages = json.loads(self.messages) if self.messages else [["user", self.prompt]]
        return [(role, content) for role, content in messages]


class Scorer(ABC):
    """Scores completions one at a time, without state."""

    @abstractmethod
    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        """Raises UserError as `check` does."""

    def check(self, prompt: str, answer: str) -> None:
        """Raises UserError on an answer that it cannot read: the data's mistake. By itself a scorer takes any."""
        return


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionScorer(Scorer):
    """A function of the user's own: `score(prompt, completion, answer, finish, **options)`.

    One with a parameter `columns` gets the row's other columns there, as a dict. One whose first parameter is
    `completion` is called by the names of its parameters: `reward(completion, answer, unit, **columns)`.
    It returns True, False or a finite number: the reward, which counts as right from 1. It returns None where it found
    no answer, or a whole Verdict. Anything it raises is the caller's to record.
    """

    def __init__(self, function: Callable[..., object], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = dict(options)
        # A parameter that no option fills.
        parameters = inspect.signature(function).parameters
        self.takes_columns = "columns" in parameters.keys() - options.keys()
        self.by_name = next(iter(parameters), "") == "completion"
        self._parameters = parameters.values()

    def check_parameters(self) -> None:
        """Raises UserError: the function cannot be called with what a configuration gives it."""
        name = self._function.__name__
        if not self.by_name:
            names = [*(["columns"] if self.takes_columns else []), *self._options]
            check_call(self._function, name, ScoreRequest._fields[:4], names)
            return
        # The rows have a column for each other parameter without a default.
        required_names = [p.name for p in self._parameters if p.default is p.empty and p.kind not in _VARIABLE]
        check_call(self._function, name, [], dict.fromkeys([*required_names, *self._options]))

    def score(self, prompt: str, completion: str, answer: str, finish: str, columns: str = "") -> Verdict:
        row = json.loads(columns or "{}")
        if self.by_name:
            texts = {"prompt": prompt, "completion": completion, "answer": answer, "finish": finish}
            result = self._function(**self._arguments({**row, **texts, **self._options}))
        else:
            more = {"columns": row} if self.takes_columns else {}
            result = self._function(prompt, completion, answer, finish, **more, **self._options)
        if isinstance(result, Verdict):
            if result.outcome not in OUTCOMES:
                raise InvalidReply(
                    f"the verifier returned the outcome {result.outcome!r}; there are: {', '.join(OUTCOMES)}"
                )
            return Verdict(_clamp(float(result.score)), result.outcome, str(result.detail))
        if result is None:
            return unparsed_answer("no answer found")
        if getattr(result, "ndim", None) == 0 and callable(item := getattr(result, "item", None)):
            result = item()  # A scalar of NumPy or torch.
        if not isinstance(result, int | float):
            raise InvalidReply(f"the verifier returned {type(result).__name__}, not a number, None or a Verdict")
        value = _clamp(float(result))
        if value == RIGHT.score:
            return RIGHT
        return Verdict(value, "right" if value > RIGHT.score else "wrong", f"reward {value:g}")

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of all values those that the function has parameters for. Raises InvalidReply: a row lacks a column."""
        parameters = [p for p in self._parameters if p.kind not in _VARIABLE]
        for parameter in parameters:
            if parameter.default is parameter.empty and parameter.name not in values:
                raise InvalidReply(f"the row has no column {parameter.name}; name it in data.columns")
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters):
            return dict(values)
        return {p.name: values[p.name] for p in parameters if p.name in values}


class ScorerHandler:
    """Answers with a verdict on each `ScoreRequest`, and on whether it can read each (prompt, answer) of the data."""

    def __init__(self, scorer: Scorer, file: str | None) -> None:
        self._scorer = scorer
        self._file = file

    def answer(self, request: tuple[str, ...]) -> Verdict:
        verdict = self._verdict(request)
        # An error may quote half a surrogate pair.
        return replace(verdict, detail=whole_characters(verdict.detail[:DETAIL_CHARACTERS]))

    def close(self) -> None:
        pass

    def _verdict(self, request: tuple[str, ...]) -> Verdict:
        try:
            if isinstance(request, ScoreRequest):
                return self._scorer.score(*request.for_scorer)
            self._scorer.check(*request)
        except UserError as error:
            return unparsed_answer(str(error))
        except BaseException as error:  # noqa: BLE001 - the verdict says what was raised
            return scorer_crash(described_error(error, self._file))
        return RIGHT


def serve_scorer(name: str, options: Mapping[str, Any]) -> Service:
    """The service of a pool for `math-verify`, `module:function` or `path/to/file.py:function`; records get versions of
    its libraries or the digest of its source. Raises UserError: a function cannot be imported, or called so."""
    if name == MATH_VERIFY:
        # Sympy takes a second and a hundred megabytes, and only the host of processes needs it.
        from fp8core.rewards.math_answer import MathScorer

        scorer = MathScorer()
        versions = {library: metadata.version(library) for library in _MATH_LIBRARIES}
        return Service({"verifier": MATH_VERIFY, **versions}, lambda: ScorerHandler(scorer, None))
    find_neighbours(name)
    function, _, digest = load_code(name, "function")
    own = FunctionScorer(function, options)
    own.check_parameters()
    return Service({"verifier": name, "source": digest}, lambda: ScorerHandler(own, file_of(function)))


def _clamp(value: float) -> float:
    if not abs(value) <= MOST_REWARD:
        raise ValueError(f"the verifier returned {value:g}; rewards are from {-MOST_REWARD:g} to {MOST_REWARD:g}")
    return value
