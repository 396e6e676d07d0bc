"""Rows with messages: the chat template renders all turns, and a verifier of one's own gets further columns."""

import json
from contextlib import nullcontext

import pytest

from fp8core.config.data import DataConfig
from fp8core.config.load import load_config
from fp8core.data.prompt import encode_prompt, refuse_unread_turns
from fp8core.data.source import problem_from_row
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer

MESSAGES = DataConfig(source="rows", messages_field="messages", answer_field="solution", columns=["unit", "tests"])
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 apples."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "How many?", "tool_calls": None},
]
ROW = {"messages": TURNS, "solution": "3", "unit": "apples", "tests": [1, {"a": None}], "unread": 1}


def test_turns_are_rendered_by_the_chat_template_and_the_template_goes_around_the_last(bpe_tokenizer):
    settings = {"model": "any", "data.messages_field": "messages", "data.template": "{question} Think."}
    problem = problem_from_row(ROW, MESSAGES, "here")
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
        ({"messages": [{**TURNS[0], "name": "me"}]}, "here: message 1 of 'messages': only `role` and `content` are"),
        ({"tests": float("nan")}, "here: data.columns=unit, tests: a value is not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(change, problem):
    with pytest.raises(UserError) as refused:
        problem_from_row({**ROW, **change}, MESSAGES, "here")
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        ("{% for message in messages %}{{ message.content | trim }}{% endfor %}", None),
        ("{{ messages[-1].content }}", "message 1, the system's"),
        ("{% for message in messages[:3] %}{{ message.content }}{% endfor %}", "message 4, the user's"),
    ],
)
def test_a_chat_template_that_leaves_a_turn_out_is_refused_with_a_row_that_has_it(
    bpe_tokenizer, tmp_path, template, left_out
):
    bpe_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    config = load_config("gsm8k", {"model": "any", "data.messages_field": "messages"})
    with nullcontext() if left_out is None else pytest.raises(UserError, match=f"^here: .* leaves out {left_out}"):
        refuse_unread_turns(problem_from_row(ROW, MESSAGES, "here"), config, Tokenizer.load(tmp_path))


def test_turns_need_a_chat_template(bpe_tokenizer, tmp_path):
    bpe_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = load_config("gsm8k", {"model": "any", "data.messages_field": "messages"})
    with pytest.raises(UserError, match="here: there are turns before the question, and the model has no chat"):
        encode_prompt(problem_from_row(ROW, MESSAGES, "here"), config, Tokenizer.load(tmp_path), 512)


def test_a_verifier_gets_the_columns_that_are_configured(loop_run, small_checkpoint, tmp_path):
    rows = [{**ROW, "messages": [*TURNS[:3], {"role": "user", "content": f"{n}?"}], "unit": f"u{n}"} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def score(prompt, completion, reference, finish, columns, scale):\n"
        "    return scale * (f'user\\n{columns[\"unit\"][1:]}?' in prompt and columns['tests'] == [1, {'a': None}])\n"
    )
    data = {"source": str(tmp_path / "rows.jsonl"), **MESSAGES.model_dump(include={"messages_field", "columns"})}
    settings = {"model": str(small_checkpoint), "architecture": None, "warm_start": None, "steps": 1}
    reward = {"verifier": f"{tmp_path / 'judge.py'}:score", "options": {"scale": 0.5}}
    run = loop_run("messages", **settings, reward=reward, data={**data, "answer_field": "solution"})
    artifacts = run.ledger.artifacts(1)
    assert run.store.get_table(artifacts["rewards"])["reward"].to_pylist() == 16 * [0.5]
    assert json.loads(run.store.get_table(artifacts["prompts"])["columns"][0].as_py()).keys() == {"unit", "tests"}
