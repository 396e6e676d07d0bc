"""Train from Python: `from fp8_grpo import train`. A training is the command `fp8-grpo run`, in a process of its own.

So kill, resume, replay and report are those of the command. A function and rows of a notebook become files below
`runs/inputs/`, in a folder named by their SHA-256. So a later cell cannot change the inputs of a run.
"""

import builtins
import dis
import inspect
import json
import os
import secrets
import signal
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE
from types import CodeType
from typing import Any

from flows.launch import say
from flows.termination import ExitCode
from fp8core import durable
from fp8core.config.data import data_key
from fp8core.config.load import load_config
from fp8core.config.run import made_name
from fp8core.errors import UserError
from fp8core.processes.end_with_parent import TiedProcess, tied_module

__all__ = ["Run", "UserError", "train"]

Config = str | os.PathLike[str] | Mapping[str, Any]
_PREFIX = "fp8-grpo: "
"""Of the line with which a command says why it stopped."""


@dataclass(frozen=True)
class Run:
    """A training that ended: its folder, and the arguments of the command."""

    folder: Path
    arguments: Sequence[str]

    @property
    def report(self) -> Path:
        """The page with all charts."""
        return self.folder / "report.html"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return dict(json.loads((self.folder / "summary.json").read_text("utf-8")))

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each step from 0, with its number as `step`: rows for `pandas.DataFrame`."""
        from fp8core.report.run_data import read_run  # Imports torch.

        return [dict(row) for row in read_run(self.folder, self.folder.name).history]

    def resume(self, **settings: Any) -> "Run":
        """Train on, with settings that change no results: `run.resume(steps=120)`. Raises what `train` raises."""
        return _trained(self.folder, [*self.arguments, *_words(settings)])


def train(
    config: Config = "tiny",
    *,
    reward: Callable[..., object] | str | Mapping[str, Callable[..., object] | str] | None = None,
    dataset: Any = None,
    **settings: Any,
) -> Run:
    """Train as `fp8-grpo run` does, with its output here; with the `run` of an earlier call, continue that training.

    config: a shipped name, a YAML file, or a mapping with a `base`. reward: `reward(completion, answer, **columns)`, or
    a value of `reward.verifier`. dataset: rows as dicts, a table of pandas or pyarrow, or a value of `data.source`. For
    a list of sources, either is a dict by their names. settings: sections (`rollout={"group_size": 4}`) or dotted
    keys.
    Raises UserError: a mistake in these; RuntimeError: the training failed, or a bound paused it; KeyboardInterrupt.
    """
    base, overrides = _layers(config)
    overrides |= settings
    datasets = {data_key(name): each for name, each in _by_source(dataset).items()}
    rewards = _by_source(reward)
    # The reading of fields and folders needs no file yet.
    known = load_config(base, {**overrides, **{f"{key}.source": "rows.jsonl" for key in datasets}})
    inputs = known.runs / "inputs"
    rows = {key: _rows(each) for key, each in datasets.items() if not isinstance(each, str | os.PathLike)}
    for key, each in datasets.items():
        path = _input(inputs, "rows.jsonl", _json_lines(rows[key])) if key in rows else each
        overrides[f"{key}.source"] = os.fspath(path)
    for name, one in rewards.items():
        overrides[f"{data_key(name)}.verifier" if name else "reward.verifier"] = (
            _code_path(one, inputs) if callable(one) else one
        )
    for name, data in known.sources.items():
        key = data_key(name)
        one = rewards.get(name, rewards.get(""))
        fields = (data.question_field, data.answer_field, data.messages_field)
        others = {field.partition(".")[0] for field in fields if field is not None}
        if callable(one) and not data.columns and (columns := _columns(one, rows.get(key, []), others)):
            overrides[f"{key}.columns"] = columns
    name = overrides["run"] = known.run or made_name(known.name, secrets.token_hex(4))
    return _trained(known.runs.absolute() / name, ["run", base, *_words(overrides)])


def _layers(config: Config) -> tuple[str, dict[str, Any]]:
    """A name or file, and the overrides on it."""
    if not isinstance(config, Mapping):
        return os.fspath(config), {}
    overrides = dict(config)
    if not isinstance(base := overrides.pop("base", None), str):
        raise UserError('config: the mapping has no `base`, as in {"base": "tiny"}')
    return base, overrides


def _by_source(value: Any) -> dict[str, Any]:
    """By the name of a source in a list; without one for all."""
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {"": value}


def _words(settings: Mapping[str, Any]) -> list[str]:
    pairs = [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in settings.items()]
    return [word for pair in pairs for word in ("--set", pair)]


def _trained(folder: Path, arguments: Sequence[str]) -> Run:
    process = TiedProcess(tied_module("flows.cli", *arguments), PIPE)
    assert process.stdout is not None, "it was started with a pipe"
    reason = ""
    while process.poll() is None:
        try:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                if text.startswith(_PREFIX):
                    reason = text.removeprefix(_PREFIX)
                else:
                    say(text)
            process.wait()
        except KeyboardInterrupt:
            # A Ctrl-C of ours does not reach its session. It ends in order, and prints how to continue.
            process.send_signal(signal.SIGINT)
    process.close_copy()
    match process.returncode:
        case ExitCode.DONE:
            return Run(folder, arguments)
        case ExitCode.MISTAKE:
            raise UserError(reason)
        case ExitCode.INTERRUPTED:
            raise KeyboardInterrupt(reason)
    raise RuntimeError(reason or f"the training ended with exit code {process.returncode}")


def _input(folder: Path, name: str, text: str) -> Path:
    content = text.encode()
    path = folder / sha256(content).hexdigest()[:12] / name
    durable.make_folder(path.parent, durable.PRIVATE)
    durable.ensure_file(path, content)
    return path


def _rows(dataset: Any) -> list[dict[str, Any]]:
    """Raises UserError: the dataset has no rows that are dicts."""
    if hasattr(dataset, "to_pylist"):  # pyarrow
        dataset = dataset.to_pylist()
    elif hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):  # pandas
        dataset = dataset.to_dict("records")
    rows = list(dataset) if isinstance(dataset, Iterable) else []
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError("dataset: expected rows as a list of dicts or a table of pandas or pyarrow, or a path")
    return rows


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"dataset, row {number}: a value is not JSON ({error})") from None
    return "\n".join(lines) + "\n"


def _code_path(function: Callable[..., object], inputs: Path) -> str:
    """`FILE.py:NAME` of a function: in its module's file, or a copy of what a notebook or a script defines.

    Raises UserError: it has no source of its own, or needs names from outside its body.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise UserError("reward: expected a function that `def` makes, as in def reward(completion, answer, **columns)")
    if function.__module__ != "__main__" and function.__qualname__ == name:
        return f"{inspect.getsourcefile(function)}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise UserError(f"reward: Python does not know the source of {name}; define it in a cell or a file") from None
    # Annotations may name what the file lacks.
    source = f"from __future__ import annotations\n\n{source}"
    if missing := _undefined(source):
        cure = "import or define it inside the function, or put both into a .py file and import that"
        raise UserError(f"reward: {name} uses {', '.join(missing)} from outside its body; {cure}")
    return f"{_input(inputs, f'{name}.py', source)}:{name}"


def _undefined(source: str) -> list[str]:
    """The names that code reads and neither defines nor imports."""
    codes = [compile(source, "reward", "exec", dont_inherit=True)]
    for code in codes:  # Which grows meanwhile.
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    operations = [each for code in codes for each in dis.get_instructions(code)]
    read = {each.argval for each in operations if each.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    defined = {each.argval for each in operations if each.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return sorted(read - defined - vars(builtins).keys())


def _columns(function: Callable[..., object], rows: Sequence[Mapping[str, Any]], others: set[str]) -> list[str]:
    """The columns but `others` that all rows have and the function takes, by name or as `**columns`."""
    parameters = inspect.signature(function).parameters.values()
    every = any(each.kind is each.VAR_KEYWORD or each.name == "columns" for each in parameters)
    names = {each.name for each in parameters}
    shared = [name for name in (rows[0] if rows else ()) if name not in others and all(name in row for row in rows)]
    return [name for name in shared if every or name in names]
