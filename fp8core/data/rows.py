"""Problems from rows of a file or a dataset, whatever loaded them."""

from collections.abc import Sequence

from fp8core.data.prompt import HELDOUT_ONE_IN, Problem, TrainingSet, generator, is_heldout, problem, problems_digest
from fp8core.errors import UserError


def problem_from_row(row: object, question_field: str, answer_field: str, place: str) -> Problem:
    """The problem in one row, its answer kept as text. Raises UserError, beginning with `place`, on a bad row."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: the row is {type(row).__name__}, not an object with fields")
    question, answer = (_text_field(row, field, place) for field in (question_field, answer_field))
    return problem(question, answer, place)


class RowSource:
    """Problems over a list of rows; see PromptSource.

    A question that occurs more than once is kept once, with its first answer. Training goes through all rows in an
    order of its own each epoch; step `i` of `n` prompts takes positions `i*n` to `i*n + n - 1`, across epochs.
    Held-out rows are ordered by prompt_id, so that the first ones are a fair sample however the file is sorted.
    """

    def __init__(self, rows: Sequence[Problem], place: str, heldout: Sequence[Problem] | None = None) -> None:
        """Without rows to hold out, one row in eight is held out by a hash of its question.

        `place` names the data in errors. Raises UserError when nothing is left to train on.
        """
        unique = _unique(rows)
        kept = _unique(heldout) if heldout is not None else {q: row for q, row in unique.items() if is_heldout(q)}
        self._place = place
        self._rows = [*unique.values(), *(row for question, row in kept.items() if question not in unique)]
        self._heldout = sorted(kept.values(), key=lambda row: row.prompt_id)
        self._training = [row for question, row in unique.items() if question not in kept]
        if not self._training:
            raise UserError(f"{place}: all {len(unique)} questions are held out, none is left to train on")

    def training_set(self) -> TrainingSet:
        return TrainingSet(problems_digest(self._training), len(self._training))

    def training(self, step: int, count: int, seed: int) -> list[Problem]:
        rows = len(self._training)
        if count > rows:
            raise UserError(f"{self._place}: a step takes {count} prompts, but there are only {rows} training rows")
        position, end = step * count, (step + 1) * count
        batch: list[Problem] = []
        while position < end:
            epoch, offset = divmod(position, rows)
            order = generator(seed, "epoch", epoch).permutation(rows)[offset : offset + end - position]
            batch += [self._training[index] for index in order]
            position += len(order)
        return batch

    def heldout(self, count: int) -> list[Problem]:
        rows = len(self._heldout)
        if count > rows:
            raise UserError(
                f"{self._place}: evaluation.prompts={count}, but there are only {rows} held-out rows "
                f"(one row in {HELDOUT_ONE_IN}, or all of evaluation.source); lower it or give more rows"
            )
        return self._heldout[:count]

    def to_check(self) -> list[Problem]:
        return self._rows


def _unique(rows: Sequence[Problem]) -> dict[str, Problem]:
    unique: dict[str, Problem] = {}
    for row in rows:
        unique.setdefault(row.question, row)
    return unique


def _text_field(row: dict[str, object], field: str, place: str) -> str:
    if field not in row:
        raise UserError(f"{place}: no field {field!r} (the row has: {', '.join(map(repr, row)) or 'none'})")
    value = row[field]
    if not isinstance(value, str):
        raise UserError(f"{place}: field {field!r} is {type(value).__name__}, not text")
    if not value.strip():
        raise UserError(f"{place}: field {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: field {field!r} holds half a surrogate pair, which is no Unicode text") from error
    return value
