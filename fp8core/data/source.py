"""Sources of problems: rows of a .jsonl or .parquet file or of a Hugging Face dataset, or the generated chain task.

`check_problems` finds mistakes in the data before the first step, not when a step draws the row.
"""

import gzip
import json
import math
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fp8core.config.data import DataConfig, SourceConfig
from fp8core.config.run import EvaluationConfig, RunConfig
from fp8core.data.chain import ChainSource
from fp8core.data.mixed import MixedSource, Part
from fp8core.data.prompt import (
    HELDOUT_ONE_IN,
    Message,
    Problem,
    PromptSource,
    check_prompt,
    generator,
    is_heldout,
    messages_of,
    problem,
    problems_digest,
)
from fp8core.data.references import left_out_text, readable
from fp8core.errors import InvalidReply, UserError, first_line
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import Verifier
from fp8core.user_files import json_kind


def problem_from_row(row: object, data: DataConfig, place: str) -> Problem:
    """Raises UserError, beginning with `place`, on a bad row."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: the row is {json_kind(row)}, not an object with fields")
    before: list[Message] = []
    if data.messages_field is None:
        question = _text_field(row, data.question_field, place)
    else:
        *before, (_, question) = _messages(row, data.messages_field, place)
    answer = _answer(row, data.answer_field, place)
    return problem(question, answer, place, tuple(before), _columns(row, data.columns, place))


_ROLES = ("system", "user", "assistant")


def _messages(row: dict[str, object], field: str, place: str) -> list[Message]:
    turns = _field(row, field, place)
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: field {field!r} is no list of messages")
    messages = []
    for number, turn in enumerate(turns, start=1):
        where = f"{place}: message {number} of {field!r}"
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise UserError(f"{where}: expected an object whose `role` is one of {', '.join(_ROLES)}")
        messages.append(Message(turn["role"], _text_field(turn, "content", where)))
    if messages[-1].role != "user":
        raise UserError(f"{place}: the last message of {field!r} is the {messages[-1].role}'s, not the user's")
    return messages


def _columns(row: dict[str, object], names: Sequence[str], place: str) -> str:
    if not names:
        return ""
    try:
        return json.dumps({name: _field(row, name, place) for name in names}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: data.columns={', '.join(names)}: a value is not JSON ({error})") from error


Row = TypeVar("Row")


class RowSource:
    """Problems over a list of rows; see PromptSource.

    A question that occurs more than once is kept once, with its first answer. Training goes through all rows in an
    order of its own each epoch; step `i` of `n` prompts takes positions `i*n` to `i*n + n - 1`, across epochs.
    Held-out rows are ordered by prompt_id, so that the first ones are a fair sample however the file is sorted.
    """

    def __init__(self, rows: Sequence[Problem], place: str, heldout: Sequence[Problem] | None = None) -> None:
        """Without rows to hold out, one row in eight is held out by a hash of its question; `place` names the data.
        Raises UserError: nothing is left to train on."""
        unique = _unique(rows)
        heldout_rows = (
            _unique(heldout) if heldout is not None else {q: row for q, row in unique.items() if is_heldout(q)}
        )
        self._place = place
        self._heldout_questions = heldout_rows.keys()
        # A question that is held out is asked as its own row has it, also where the training file has another answer.
        self._rows = [*(unique | heldout_rows).values()]
        self._heldout = sorted(heldout_rows.values(), key=lambda row: row.prompt_id)
        self._training = [row for question, row in unique.items() if question not in heldout_rows]
        if not self._training:
            raise UserError(f"{place}: all {len(unique)} questions are held out, none is left to train on")

    def training_digest(self) -> str:
        return problems_digest(self._training)

    def digest(self) -> str:
        return problems_digest([*self._training, *self._heldout])

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        rows = len(self._training)
        if count > rows:
            raise UserError(f"{self._place}: a step takes {count} prompts, but there are only {rows} training rows")
        return self.at(step * count, count, seed)

    def at(self, position: int, count: int, seed: int) -> list[Problem]:
        return in_epochs(self._training, position, count, seed, "epoch")

    def heldout(self, count: int) -> list[Problem]:
        rows = len(self._heldout)
        if count > rows:
            lower = "lower it, give more rows" if rows else "give more different rows"
            raise UserError(
                f"{self._place}: evaluation.prompts takes {count} held-out rows, but there are {rows} (one row in "
                f"{HELDOUT_ONE_IN}, or all of a file of held-out rows); {lower}, or name such a file"
            )
        return self._heldout[:count]

    def to_check(self) -> list[Problem]:
        return self._rows

    def without(self, rows: Iterable[Problem]) -> Self:
        removed_prompts = {row.whole_question for row in rows}
        less = copy(self)
        less._rows, less._heldout, less._training = (
            [row for row in part if row.whole_question not in removed_prompts]
            for part in (self._rows, self._heldout, self._training)
        )
        if not less._training:
            raise UserError(f"{self._place}: none of the {len(self._training):,} rows to train on is left")
        return less

    def holds_out(self, question: str) -> bool:
        return question in self._heldout_questions

    def never_training(self, holds_out: Callable[[str], bool]) -> Self:
        less = copy(self)
        less._training = [row for row in self._training if not holds_out(row.whole_question)]
        if not less._training:
            raise UserError(f"{self._place}: other sources hold out all questions, none is left to train on")
        return less


def in_epochs(rows: Sequence[Row], position: int, count: int, seed: int, purpose: str) -> list[Row]:
    """Rows from a position of an endless sequence: all rows in an order of its own each epoch."""
    end = position + count
    batch: list[Row] = []
    while position < end:
        epoch, offset = divmod(position, len(rows))
        order = generator(seed, purpose, epoch).permutation(len(rows))[offset : offset + end - position]
        batch += [rows[index] for index in order]
        position += len(order)
    return batch


def _unique(rows: Sequence[Problem]) -> dict[str, Problem]:
    unique: dict[str, Problem] = {}
    for row in rows:
        unique.setdefault(row.whole_question, row)
    return unique


def _field(row: dict[str, object], field: str, place: str) -> object:
    """The value of a field, or of one within another, whose names have a dot between them."""
    value: object = row
    for name in [field] if field in row else field.split("."):
        if not isinstance(value, dict) or name not in value:
            there = ", ".join(map(repr, value)) if isinstance(value, dict) else json_kind(value)
            raise UserError(f"{place}: no field {field!r} (there is {there or 'none'})")
        value = value[name]
    return value


def _answer(row: dict[str, object], field: str, place: str) -> str:
    """The answer; a number is its text without an exponent."""
    value = _field(row, field, place)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text_field(row, field, place)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{place}: field {field!r} is {value}, which is no number to compare with")
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="0")


def _text_field(row: dict[str, object], field: str, place: str) -> str:
    value = _field(row, field, place)
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} is {json_kind(value)}, not text")
    if not value.strip():
        raise UserError(f"{place}: field {field!r} is empty")
    return value


SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def read_file(path: Path, data: DataConfig) -> list[Problem]:
    """Raises UserError, with the place of a bad row."""
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: only .jsonl, .jsonl.gz and .parquet files are read")
    read = _parquet_rows if path.suffix == ".parquet" else _json_rows
    try:
        rows = [problem_from_row(row, data, place) for place, row in read(path)]
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or first_line(error)})") from error
    if not rows:
        raise UserError(f"{path}: the file has no rows")
    return rows


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    numbers = count()
    for batch in pq.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            yield f"{path}, row {next(numbers)}", row


def _json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Place and content of every line that is not blank. All are read before: so a checksum is verified."""
    with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else file as content:
        # Ends at line feeds alone: JSON text may hold other line separators.
        lines = content.read().removeprefix(BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            yield place, json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 (byte {error.start + 1} of the line)") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON ({error.msg.removesuffix(' at')}, column {error.colno})") from error


def read_hub_dataset(data: DataConfig) -> list[Problem]:
    """Every row of one split; `data.source` is a name on the hub or a folder of data files."""
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"data.source={data.source} is neither `chain` nor a .jsonl or .parquet file, so it is taken for "
            "a Hugging Face dataset, which needs: pip install 'fp8-grpo[datasets]'"
        ) from error
    # Its bars and lines would stand between ours.
    datasets.disable_progress_bars()
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        table = datasets.load_dataset(data.source, data.subset, split=data.split, revision=data.revision)
    except ConnectionError as error:
        raise UserError(
            f"data.source={data.source}: no file or folder here, not in the local cache, and the hub is out of reach; "
            "run once with a network, or set data.source to a .jsonl file of its rows"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = ": ".join(first_line(part) for part in (error, error.__cause__) if part is not None)
        hint = "" if Path(data.source).is_dir() else ", and no file or folder here"
        raise UserError(
            f"data.source={data.source}: cannot be loaded as a Hugging Face dataset ({reason}){hint}"
        ) from error
    place = f"{data.source}, split {data.split}"
    rows = [problem_from_row(row, data, f"{place}, row {number}") for number, row in enumerate(table)]
    if not rows:
        raise UserError(f"{place}: the dataset has no rows")
    return rows


def build_source(data: DataConfig | Sequence[SourceConfig], evaluation: EvaluationConfig) -> PromptSource:
    if isinstance(data, DataConfig):
        return _one_source(data, evaluation.source)
    parts: dict[str, Part] = {source.name: _one_source(source, source.heldout) for source in data}
    return MixedSource(parts, {source.name: source.weight for source in data})


def _one_source(data: DataConfig, heldout: str | None) -> RowSource | ChainSource:
    if data.source != "chain":
        return RowSource(read_rows(data), data.source, read_file(Path(heldout), data) if heldout else None)
    if heldout is not None:
        raise UserError(f"evaluation.source={heldout}: the chain task holds out prompts of its own; unset it")
    return ChainSource(data.chain)


def read_rows(data: DataConfig) -> list[Problem]:
    """Every row of a file or a Hugging Face dataset, in order. Raises UserError on data that cannot be read."""
    path = Path(data.source)
    is_file = data.source.endswith(SUFFIXES) or data.source.startswith((".", "/", "~")) or path.exists()
    return read_file(path, data) if is_file and not path.is_dir() else read_hub_dataset(data)


class CheckedSource(NamedTuple):
    """A source without the rows that are left out, their number, and a line about them."""

    source: PromptSource
    left_out: int
    remark: str | None


def check_problems(
    source: PromptSource, config: RunConfig, tokenizer: Tokenizer, max_positions: int, verifier: Verifier
) -> CheckedSource:
    """Raises UserError on an answer that cannot be read (but see `readable`), an unfit prompt, and too few rows."""
    every = list(source.to_check())
    problems, left_out = readable(every, config, verifier)
    if left_out:
        try:
            source = source.without(row for row, _ in left_out)
        except UserError as error:
            raise UserError(
                f"{error}: {left_out_text(left_out, len(every))}; the first: {left_out[0].fault}"
            ) from error
    source.heldout(config.evaluation.prompts)
    for row in problems:
        check_prompt(row, config, tokenizer, max_positions)
    source.training(0, config.rollout.drawn_prompts, config.seed)
    return CheckedSource(
        source, len(left_out), f"{left_out_text(left_out, len(every))} and left out" if left_out else None
    )


def failed_answer(problem: Problem, config: RunConfig, verifier: Verifier) -> str | None:
    """The failure of the main verifier where a completion is the answer. Raises UserError: it returned no verdict."""
    further = (problem.columns, problem.source, messages_of(problem, config))
    answer = ScoreRequest(problem.question, problem.answer, problem.answer, "stop", *further)
    (verdict,) = verifier.main.verify([answer])
    # A judge whose reply has no score may have no room for it, or another form.
    if verdict.outcome not in ("timeout", "crashed") and not (verdict.outcome == "unparsed" and verdict.judgements):
        return None
    setting = config.verifier_settings[problem.source]
    if (invalid := InvalidReply.read(verdict.detail)) is not None:
        raise UserError(f"{setting}: {invalid}")
    return f"{setting}: it fails where a completion is the reference of the first problem: {verdict.detail}"
