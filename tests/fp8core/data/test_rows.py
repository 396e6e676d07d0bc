"""Rows of other layouts than GSM8K's: parquet files, answers that are numbers, fields within fields, messages."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8core.config.data import DataConfig
from fp8core.config.load import load_config
from fp8core.data.prompt import encode_prompt, problem
from fp8core.data.source import problem_from_row, read_file
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.integer import answer_integer

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
    assert [answer_integer(row.answer, row.question) for row in rows] == [2, 3]
    assert [row.columns for row in rows] == ['{"extra_info.index": 1}', '{"extra_info.index": 2}']


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("reward_model.truth", "no field 'reward_model.truth' (there is 'ground_truth', 'style')"),
        ("ability.truth", "no field 'ability.truth' (there is text)"),
        ("reward.truth", "no field 'reward.truth' (there is 'ability', 'data_source', 'extra_info', "),
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


@pytest.mark.parametrize(("value", "text"), [(42, "42"), (3.5, "3.5"), (42.0, "42.0"), (1e-5, "0.00001")])
def test_an_answer_that_is_a_number_in_parquet(tmp_path: Path, value: float, text: str) -> None:
    path = stored(tmp_path / "rows.parquet", [{"question": "q", "answer": value}])
    assert read_file(path, DataConfig()) == [problem("q", text)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"question": "q", "answer": "1"}, {"question": None, "answer": "1"}], ", row 1: field 'question' is null"),
        ([{"question": "q", "answer": float("nan")}], ", row 0: field 'answer' is nan, which is no number"),
        ([], ": the file has no rows"),
        (b"PAR1 and no more", ": cannot be read ("),
        (None, ": cannot be read ("),
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


# Rows with messages

MESSAGES = DataConfig(source="rows", messages_field="messages", answer_field="solution", columns=["unit", "tests"])
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 apples."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "How many?", "tool_calls": None},
]
TURNS_ROW = {"messages": TURNS, "solution": "3", "unit": "apples", "tests": [1, {"a": None}], "unread": 1}


def test_turns_are_rendered_by_the_chat_template_and_the_template_goes_around_the_last(bpe_tokenizer):
    settings = {"model": "any", "data.messages_field": "messages", "data.template": "{question} Think."}
    problem = problem_from_row(TURNS_ROW, MESSAGES, "here")
    text, tokens = encode_prompt(problem, load_config("gsm8k", settings), bpe_tokenizer, 512)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTom has 3 apples.<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nHow many? Think.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens == bpe_tokenizer.encode(text)
    assert json.loads(problem.columns) == {"unit": "apples", "tests": [1, {"a": None}]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"messages": "How many?"}, "here: field 'messages' is no list of messages"),
        ({"messages": TURNS[:3]}, "here: the last message of 'messages' is the assistant's, not the user's"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "here: message 1 of 'messages': expected an object whose"),
        ({"tests": float("nan")}, "here: data.columns=unit, tests: a value is not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(change, problem):
    with pytest.raises(UserError) as refused:
        problem_from_row({**TURNS_ROW, **change}, MESSAGES, "here")
    assert str(refused.value).startswith(problem)


def test_turns_need_a_chat_template(bpe_tokenizer, tmp_path):
    bpe_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = load_config("gsm8k", {"model": "any", "data.messages_field": "messages"})
    with pytest.raises(UserError, match="here: there are turns before the question, and the model has no chat"):
        encode_prompt(problem_from_row(TURNS_ROW, MESSAGES, "here"), config, Tokenizer.load(tmp_path), 512)


def test_a_verifier_gets_the_columns_that_are_configured(loop_run, small_checkpoint, tmp_path):
    rows = [
        {**TURNS_ROW, "messages": [*TURNS[:3], {"role": "user", "content": f"{n}?"}], "unit": f"u{n}"}
        for n in range(80)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def score(prompt, completion, answer, finish, columns, scale):\n"
        "    return scale * (f'user\\n{columns[\"unit\"][1:]}?' in prompt and columns['tests'] == [1, {'a': None}])\n"
    )
    data = {"source": str(tmp_path / "rows.jsonl"), **MESSAGES.model_dump(include={"messages_field", "columns"})}
    settings = {"model": str(small_checkpoint), "architecture": None, "warm_start": None, "steps": 1}
    reward = {"verifier": f"{tmp_path / 'judge.py'}:score", "options": {"scale": 0.5}}
    run = loop_run("messages", **settings, reward=reward, data={**data, "answer_field": "solution"})
    artifacts = run.ledger.artifacts(1)
    assert run.store.get_table(artifacts["rewards"])["reward"].to_pylist() == 16 * [0.5]
    assert json.loads(run.store.get_table(artifacts["prompts"])["columns"][0].as_py()).keys() == {"unit", "tests"}
