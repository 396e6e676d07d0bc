"""What scores one completion, and how one is found by its name: `math-verify`, or a function of the user's own.

Imported by the child processes, hence free of everything heavy.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from fp8core.errors import UserError, first_line
from fp8core.rewards.verdict import OUTCOMES, RIGHT, Verdict, unparsed

MATH_VERIFY = "math-verify"
_MATH_LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy")


class Answer(NamedTuple):
    """A completion (without end of sequence), what it answers, and how it ended: "stop" or, cut off, "length"."""

    prompt: str
    completion: str
    reference: str
    finish: str


class Scorer(Protocol):
    """Scores completions one at a time, without state."""

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        """The verdict on an answer. Raises UserError as `check` does."""
        ...

    def check(self, prompt: str, reference: str) -> None:
        """Raises UserError on a reference that is no answer: the data's mistake."""
        ...


class FunctionScorer:
    """A function of the user's own: `score(prompt, completion, reference, finish, **options)`.

    It returns True, False or a finite number, the reward, and counts as right from 1; None where it found no answer; or
    a whole Verdict. Anything it raises is the caller's to record.
    """

    def __init__(self, function: Callable[..., object], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = dict(options)

    def score(self, prompt: str, completion: str, reference: str, finish: str) -> Verdict:
        said = self._function(prompt, completion, reference, finish, **self._options)
        if isinstance(said, Verdict):
            if said.outcome not in OUTCOMES:
                raise ValueError(
                    f"the verifier returned the outcome {said.outcome!r}; there are: {', '.join(OUTCOMES)}"
                )
            return Verdict(_refuse_infinite(float(said.score)), said.outcome, str(said.detail))
        if said is None:
            return unparsed("no answer found")
        if not isinstance(said, int | float):
            raise TypeError(f"the verifier returned {type(said).__name__}, not a number, None or a Verdict")
        value = _refuse_infinite(float(said))
        if value == RIGHT.score:
            return RIGHT
        return Verdict(value, "right" if value > RIGHT.score else "wrong", f"reward {value:g}")

    def check(self, prompt: str, reference: str) -> None:
        """What a reference must be is known to the function alone."""


class LoadedScorer(NamedTuple):
    """A scorer, and what goes into the record of every step: versions of its libraries, or the digest of its source."""

    scorer: Scorer
    description: dict[str, str]


def load_scorer(name: str, options: Mapping[str, Any]) -> LoadedScorer:
    """The scorer of a name: `math-verify`, `module:function` or `path/to/file.py:function`.

    Raises UserError: there is no such module, file or function, or importing it fails.
    """
    if name == MATH_VERIFY:
        return _math_scorer()
    place, _, attribute = name.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(f"{place} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{place} has no function {attribute}")
    source = module.__file__
    if source is None:
        raise UserError(f"{place} is a folder, not a module")
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return LoadedScorer(FunctionScorer(function, options), {"verifier": name, "source": digest})


def _math_scorer() -> LoadedScorer:
    try:
        # Sympy takes a second and a hundred megabytes, and only child processes need it.
        from fp8core.rewards.math_expression import MathScorer
    except ImportError as error:
        raise UserError("it needs: pip install 'fp8-grpo[math]'") from error
    versions = {library: metadata.version(library) for library in _MATH_LIBRARIES}
    return LoadedScorer(MathScorer(), {"verifier": MATH_VERIFY, **versions})


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as Python runs a script: it finds its neighbours."""
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a name in .py has a loader"
    assert spec.loader is not None, "a name in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _refuse_infinite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the verifier returned {value}; rewards must be finite")
    return value
