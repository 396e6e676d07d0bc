"""Right answers as texts after prompts: what a reference becomes, and what cannot be written."""

import json

import pytest

from fp8core.config.load import load_config
from fp8core.data.chain import ALPHABET, EOS
from fp8core.data.prompt import problem
from fp8core.models.tokenizer import character_tokenizer
from fp8core.run.parts import right_answer


@pytest.fixture
def rows(tmp_path):
    """Settings of a plain file of problems, which has no chat template."""
    file = tmp_path / "sums.jsonl"
    file.write_text(json.dumps({"question": "1+2=", "answer": "#### 3"}) + "\n")
    return load_config("real", {"data.source": str(file), "data.max_prompt_tokens": 32, "reward.verifier": "integer"})


@pytest.fixture
def tokenizer():
    return character_tokenizer(f"{ALPHABET} ", 32, EOS)


@pytest.mark.parametrize(
    ("question", "reference", "written"),
    [
        ("1+2=", "1 and 2 are 3\n#### 3", " 3"),
        ("1+2=", "12", " 12"),
        ("1+2= ", "#### 3", "3"),
        ("1+2=", "#### ", ""),
        ("1+2=", "three", ""),
    ],
)
def test_a_right_answer_is_what_the_reference_ends_in(rows, tokenizer, question, reference, written):
    assert tokenizer.decode(right_answer(problem(question, reference), rows, tokenizer)) == written


def test_the_chain_task_has_its_bare_completion(tokenizer):
    found = right_answer(problem("1+2=", "3"), load_config("tiny"), tokenizer)
    assert tokenizer.decode(found, special=True) == "#3$"
