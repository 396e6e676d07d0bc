"""What an environment says first makes prompts too long: found before a run begins."""

import json

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.build import build_base
from fp8core.run.open import check_inputs

ENVIRONMENT = """
from fp8core.environments.protocol import Outcome, Said, Turn

class Own:
    def __init__(self, *, rules="", only_for="", begun=""):
        self._rules, self._only_for, self._begun = rules, only_for, begun

    def start(self, task):
        with open(self._begun, "a") as file:
            file.write(task.question + chr(10))
        rules = self._rules if self._only_for in task.question else ""
        return Turn((Said("system", rules), Said("user", task.question)))

    def step(self, action):
        return Outcome("judge")

    def close(self):
        pass
"""
SHORT = [f"What is {number} and 1?" for number in range(10, 30)]
LONG = "What is 7 and 2 and 3 and 4 and 5 and 6 and 7 and 8 and 9?"
RULES = "You get a question and answer it. " * 4


@pytest.fixture
def checked(tmp_path, small_checkpoint):
    """Check questions of a file with an environment; returns the configuration and the questions that it began."""
    place, begun = tmp_path / "own.py", tmp_path / "begun"
    place.write_text(ENVIRONMENT)

    def call(questions, most=384, settings=None, **options):
        rows = [{"question": question, "answer": "#### 1"} for question in questions]
        (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        overrides = {
            **{"model": small_checkpoint, "data.source": str(tmp_path / "train.jsonl"), "data.template": "{question}"},
            **{"data.max_prompt_tokens": most, "evaluation.prompts": 1, "rollout.max_new_tokens": 64},
            "environment": {"name": f"{place}:Own", "options": {"begun": str(begun), **options}, "format": "plain"},
            **(settings or {}),
        }
        begun.write_text("")
        config = load_config("gsm8k", overrides)
        check_inputs(config)
        return config, begun.read_text().splitlines()

    return call


def length_of(config, *messages):
    tokenizer = build_base(config).tokenizer
    told = [{"role": role, "content": content} for role, content in messages]
    return len(tokenizer.encode(tokenizer.render(told)))


def test_the_longest_problem_is_begun_and_refused_with_its_place(checked):
    config, begun = checked([*SHORT, LONG], rules=RULES)
    assert begun == [LONG]
    exactly = length_of(config, ("system", RULES), ("user", LONG))
    checked([*SHORT, LONG], most=exactly, rules=RULES)
    with pytest.raises(UserError, match=rf"train\.jsonl:21: .* has {exactly} tokens .*; 1 to {exactly - 1} fit"):
        checked([*SHORT, LONG], most=exactly - 1, rules=RULES)


def test_a_first_message_that_has_no_tokens_is_refused(tmp_path):
    place = tmp_path / "own.py"
    place.write_text(ENVIRONMENT)
    environment = {"name": f"{place}:Own", "options": {"begun": str(tmp_path / "begun"), "rules": "Be brief."}}
    with pytest.raises(UserError, match=r"environment\.name=.*own.py:Own begins with: the tokenizer has no token for"):
        check_inputs(load_config("tiny", {"environment": environment, "rollout.max_new_tokens": 32}))
