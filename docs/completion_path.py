"""Count what a completion passes from its prompt to the update: functions, files and types, in order.

    python docs/completion_path.py tiny
    python docs/completion_path.py tiny-tools

A small run of the configuration is made twice, with equal results. The first run shows the data of one completion of
step 1: prompt, tokens, log-probs, text, reward and advantage. The verifier is a hash of the text: each completion has a
reward of its own. A profiler observes step 1 of the second run, until its update is done.

A function carries the completion when an argument or a result holds any of this data. It may be a text, a run of token
ids in a list, an array or a tensor, or the exact number. Containers, tables and objects of the project are searched six
levels deep. `self` is searched where it is a record (a dataclass or a named tuple), the run's context never. Objects
that only hold digests (`Ref`) carry nothing, neither do activations. Below `fp8core.numerics`, where a completion is a
row of numbers without a name, functions are not searched. A type carries the data that a search finds in one of its
instances. Listed are types that pass from file to file: what only the file of its class passes is private to it. Types
that are not declared as records are holders.
"""

import dataclasses
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.context import RunContext
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fp8core", "tasks", "flows")
ARITHMETIC = "fp8core/numerics/"
SMALL = {
    "steps": 1,
    "warm_start.steps": 2,
    "warm_start.batch_size": 8,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 4,
    "evaluation.prompts": 2,
    "evaluation.precision_gap": 0,
}
VERIFIER = """import zlib
def score(prompt, completion, answer, finish):
    return zlib.crc32(completion.encode()) / 2**32
"""
_DEPTH = 6
_MOST_ELEMENTS = 1 << 12
_FRUITLESS = 40
"""Calls without the data after which a function is not searched any more."""


class CompletionData(NamedTuple):
    """The data of one completion; `numbers`: reward, advantage and its lowest log-prob."""

    texts: tuple[str, ...]
    token_runs: tuple[str, ...]
    numbers: tuple[float, ...]


class CompletionPath(NamedTuple):
    """Functions as `file:name` and types as `module.Name`, each in the order in which the completion came."""

    functions: list[str]
    types: list[str]
    holders: list[str]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(function.partition(":")[0] for function in self.functions))


def completion_path(name: str, overrides: Mapping[str, Any] | None = None) -> CompletionPath:
    """The path of one completion of a small run of a configuration, in temporary folders."""
    with tempfile.TemporaryDirectory() as folder:
        verifier = Path(folder) / "distinct.py"
        verifier.write_text(VERIFIER)
        settings = {**SMALL, "reward.verifier": f"{verifier}:score", **(overrides or {})}
        data = _run(name, {**settings, "runs": f"{folder}/first"}, _first_completion)
        search = Search(data)
        _run(name, {**settings, "runs": f"{folder}/second"}, lambda run: None, search)
    return CompletionPath([*search.functions], [*search.types], [*search.holders])


def _run(
    name: str, settings: Mapping[str, Any], result: Callable[[RunContext], Any], search: "Search | None" = None
) -> Any:
    config = load_config(name, {**settings, "run": "path"})
    with (
        open_directory(config, "path") as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        if search is not None:
            threading.setprofile(search.observe)
            sys.setprofile(search.observe)
        try:
            train(run)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return result(run)


def _first_completion(run: RunContext) -> CompletionData:
    """Of a completion whose reward is not the mean of its group."""
    artifacts, store = run.directory.ledger.artifacts(1), run.store
    tables = {name: store.get_table(artifacts[name]).to_pylist() for name in ("rollouts", "rewards", "advantages")}
    rows = zip(*tables.values(), strict=True)
    rollout, reward, advantage = next(row for row in rows if row[2]["advantage"] and len(row[0]["tokens"]) > 2)
    prompts = store.get_table(artifacts["prompts"]).to_pylist()
    prompt = next(row for row in prompts if row["group"] == rollout["group"])
    logprob = min(rollout["logprobs"])
    numbers = reward["reward"], advantage["advantage"], float(np.float32(advantage["advantage"])), logprob
    return CompletionData(
        (prompt["text"], rollout["text"]),
        tuple(_joined(tokens) for tokens in (prompt["tokens"], rollout["prompt_tokens"], rollout["tokens"])),
        numbers,
    )


def _joined(tokens: Sequence[int]) -> str:
    return f",{','.join(map(str, tokens))},"


class Search:
    """The profiler's hook: notes what holds the data of the completion, from the first step to the end of `train`."""

    def __init__(self, data: CompletionData) -> None:
        self._data = data
        # As ordered sets.
        self.functions, self.types, self.holders = dict[str, None](), dict[str, None](), dict[str, None]()
        self._fruitless: dict[CodeType, int] = {}
        self._first: CodeType | None = None
        self._ended = False
        self._busy, self._file = threading.local(), ""

    def observe(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if self._ended or event not in ("call", "return") or getattr(self._busy, "now", False):
            return
        place = _place_of(code)
        if place is None or not (self._first or self._begins(frame, code, place)):
            return
        self._busy.now = True
        try:
            self._search_call(frame, event, result, place)
        finally:
            self._busy.now = False
        if event == "return" and place.startswith("tasks/train.py:train"):
            self._ended = True

    def _begins(self, frame: FrameType, code: CodeType, place: str) -> bool:
        if place.startswith("tasks/") and frame.f_locals.get("index") == 1:
            self._first = code
        return self._first is not None

    def _search_call(self, frame: FrameType, event: str, result: Any, place: str) -> None:
        code, self._file = frame.f_code, place.partition(":")[0]
        if self._fruitless.get(code, 0) > _FRUITLESS:
            return
        values = [result] if event == "return" else [*_arguments(frame, code)]
        if any([self._holds(value, _DEPTH, set()) for value in values]):
            self.functions[place] = None
            self._fruitless[code] = -sys.maxsize
        else:
            self._fruitless[code] = self._fruitless.get(code, 0) + 1

    def _holds(self, value: Any, depth: int, above: set[int]) -> bool:
        if value is None or isinstance(value, bool | int | bytes | RunContext) or id(value) in above or depth == 0:
            return False
        if isinstance(value, str):
            return value in self._data.texts
        if isinstance(value, float):
            return value in self._data.numbers
        if isinstance(value, torch.Tensor):
            searched = value.numel() <= _MOST_ELEMENTS and not isinstance(value, torch.nn.Parameter)
            return searched and self._in_array(_array_of(value))
        if isinstance(value, np.ndarray):
            return value.size <= _MOST_ELEMENTS and self._in_array(value)
        if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
            return self._holds(value.to_pylist(), depth + 2, above)
        parts = _parts_of(value)
        if parts is None:
            return False
        if isinstance(value, list | tuple) and parts and isinstance(parts[0], int | float) and not _is_record(value):
            return self._in_list(parts)
        if not any([self._holds(part, depth - 1, above | {id(value)}) for part in parts]):
            return False
        kind = type(value)
        if kind.__module__.partition(".")[0] in PACKAGES and f"{kind.__module__.replace('.', '/')}.py" != self._file:
            (self.types if _is_record(value) else self.holders)[f"{kind.__module__}.{kind.__qualname__}"] = None
        return True

    def _in_list(self, values: Sequence[Any]) -> bool:
        if isinstance(values[0], float):
            return any(number in values for number in self._data.numbers)
        return any(run in _joined(values) for run in self._data.token_runs)

    def _in_array(self, array: np.ndarray[Any, Any]) -> bool:
        if array.dtype in (np.int32, np.int64):
            return self._in_list([0, *array.reshape(-1).tolist()])
        if array.dtype in (np.float32, np.float64):
            return any(bool((array == array.dtype.type(number)).any()) for number in self._data.numbers)
        return False


def _place_of(code: CodeType) -> str | None:
    if not code.co_filename.startswith(str(ROOT)) or code.co_name.startswith("<"):
        return None
    file = Path(code.co_filename).relative_to(ROOT).as_posix()
    searched = file.partition("/")[0] in PACKAGES and not file.startswith(ARITHMETIC)
    return f"{file}:{code.co_qualname}" if searched else None


def _arguments(frame: FrameType, code: CodeType) -> Iterator[Any]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if name not in ("self", "cls") or _is_record(value):
            yield value


def _array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    known = tensor.dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
    return tensor.detach().numpy() if known else np.empty(0)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or hasattr(type(value), "_fields")


def _parts_of(value: Any) -> list[Any] | None:
    """Elements of a container, or values of the fields of an object of the project; None of anything else."""
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if type(value).__module__.partition(".")[0] not in PACKAGES or isinstance(value, type):
        return None
    return [*getattr(value, "__dict__", {}).values()]


def main(names: Sequence[str]) -> None:
    for name in names or ("tiny",):
        path = completion_path(name)
        for function in path.functions:
            print(function)
        print()
        for title, types in (("types", path.types), ("holders", path.holders)):
            print(f"{title}: {', '.join(types)}")
        counts = f"{len(path.files)} files, {len(path.functions)} functions, {len(path.types)} types"
        print(f"{name}: {counts}, {len(path.holders)} holders")


if __name__ == "__main__":
    main(sys.argv[1:])
