"""Rows of a Hugging Face dataset, through the optional `datasets` library."""

from fp8core.config.run import DataConfig
from fp8core.data.prompt import Problem
from fp8core.data.rows import problem_from_row
from fp8core.errors import UserError


def read_hub_dataset(data: DataConfig) -> list[Problem]:
    """Every row of one split, in order; `data.source` is a name on the hub or a folder of data files.

    Raises UserError without the library, when the dataset is unknown or out of reach, and on a row that is no problem.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data.source={data.source} is neither `chain` nor a .jsonl file, so it is taken for "
            "a Hugging Face dataset, which needs: pip install 'fp8-grpo[datasets]'"
        ) from error
    try:
        table = datasets.load_dataset(data.source, data.subset, split=data.split, revision=data.revision)
    except ConnectionError as error:
        raise UserError(
            f"data.source={data.source}: not in the local cache and the hub is out of reach; "
            "run once with a network, or set data.source to a .jsonl file of its rows"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.source={data.source}: cannot be loaded as a Hugging Face dataset ({reason})") from error
    place = f"{data.source}, split {data.split}"
    fields = data.question_field, data.answer_field
    rows = [problem_from_row(row, *fields, f"{place}, row {number}") for number, row in enumerate(table)]
    if not rows:
        raise UserError(f"{place}: the dataset has no rows")
    return rows
