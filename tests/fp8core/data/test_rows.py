"""Rows of other layouts than GSM8K's: parquet files, answers that are numbers, fields within fields."""

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8core.config.data import DataConfig
from fp8core.data.prompt import problem
from fp8core.data.source import read_file
from fp8core.errors import UserError
from fp8core.rewards.integer import reference_integer

NESTED = DataConfig(
    source="rows.parquet",
    answer_field="reward_model.ground_truth",
    messages_field="prompt",
    columns=["extra_info.index"],
)


def verl_row(number: int) -> dict[str, object]:
    """A row as verl's `examples/data_preprocess/gsm8k.py` writes it."""
    question = f'{number}+1=? Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "answer": f"#### {number + 1}", "question": f"{number}+1=?"},
    }


def stored(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_of_verl(tmp_path: Path, name: str) -> None:
    """Its reference is the number alone, which `integer` reads."""
    rows = read_file(stored(tmp_path / name, [verl_row(1), verl_row(2)]), NESTED)
    assert [row.question[:5] for row in rows] == ["1+1=?", "2+1=?"]
    assert [reference_integer(row.reference, row.question) for row in rows] == [2, 3]
    assert [row.columns for row in rows] == ['{"extra_info.index": 1}', '{"extra_info.index": 2}']


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("reward_model.truth", "no field 'reward_model.truth' (field 'reward_model' has: 'ground_truth', 'style')"),
        ("ability.truth", "no field 'ability.truth' (field 'ability' is text)"),
        ("reward.truth", "no field 'reward.truth' (the row has: 'ability', 'data_source', 'extra_info', "),
    ],
)
def test_a_field_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, field: str, message: str) -> None:
    row = json.loads(json.dumps(verl_row(1), sort_keys=True))
    path = stored(tmp_path / "rows.parquet", [row])
    with pytest.raises(UserError) as caught:
        read_file(path, NESTED.model_copy(update={"answer_field": field}))
    assert str(caught.value).startswith(f"{path}, row 0: {message}")


@pytest.mark.parametrize("text", ["42", "-7", "3.5", "3.0", "1" * 400])
def test_an_answer_that_is_a_number_is_its_text_in_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "q", "answer": {text}, "score": 2.50}}\n')
    assert read_file(path, DataConfig(source="rows.jsonl", columns=["score"])) == [
        problem("q", text, columns='{"score": 2.5}')
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(42, "42"), (3.5, "3.5"), (42.0, "42.0"), (1e-5, "0.00001"), (Decimal("3.10"), "3.10")]
)
def test_an_answer_that_is_a_number_in_parquet(tmp_path: Path, value: float | Decimal, text: str) -> None:
    path = stored(tmp_path / "rows.parquet", [{"question": "q", "answer": value}])
    assert read_file(path, DataConfig()) == [problem("q", text)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"question": "q", "answer": "1"}, {"question": None, "answer": "1"}], ", row 1: field 'question' is null"),
        ([{"question": "q", "answer": float("nan")}], ", row 0: field 'answer' is nan, which is no number"),
        ([], ": the file has no rows"),
        (b"PAR1 and no more", ": damaged parquet data"),
        (None, ": no such file"),
    ],
)
def test_a_bad_parquet_file_is_refused_in_a_line(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "rows.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, list):
        stored(path, content)
    with pytest.raises(UserError) as caught:
        read_file(path, DataConfig())
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)
