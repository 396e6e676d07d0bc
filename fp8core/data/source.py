"""The one place where a configuration becomes a source of problems."""

from pathlib import Path

from fp8core.config.run import DataConfig, EvaluationConfig
from fp8core.data.chain import ChainSource
from fp8core.data.hub_dataset import read_hub_dataset
from fp8core.data.jsonl import SUFFIXES, read_jsonl
from fp8core.data.prompt import Problem, PromptSource
from fp8core.data.rows import RowSource
from fp8core.errors import UserError


def build_source(data: DataConfig, evaluation: EvaluationConfig) -> PromptSource:
    """The source of prompts for training and evaluation.

    Raises UserError on data that cannot be read, and on fewer held-out problems than `evaluation.prompts`.
    """
    source = _generated(data, evaluation) if data.source == "chain" else _rows(data, evaluation)
    source.heldout(evaluation.prompts)  # Too few is better said now than at the first evaluation.
    return source


def _generated(data: DataConfig, evaluation: EvaluationConfig) -> ChainSource:
    if evaluation.source is not None:
        raise UserError(f"evaluation.source={evaluation.source}: the chain task holds out prompts of its own; unset it")
    return ChainSource(data.chain)


def _rows(data: DataConfig, evaluation: EvaluationConfig) -> RowSource:
    heldout = None
    if evaluation.source is not None:
        heldout = read_jsonl(Path(evaluation.source), data.question_field, data.answer_field)
    return RowSource(read_rows(data), data.source, heldout)


def read_rows(data: DataConfig) -> list[Problem]:
    """Every row of a file or a Hugging Face dataset, in order. Raises UserError on data that cannot be read."""
    # An existing file of another kind goes to the reader of files, which says what it reads.
    if data.source.endswith(SUFFIXES) or Path(data.source).is_file():
        return read_jsonl(Path(data.source), data.question_field, data.answer_field)
    return read_hub_dataset(data)
