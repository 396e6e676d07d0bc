"""What an environment says first makes prompts too long, or chat templates cannot go on: found before a run begins."""

import json
import re
import shutil
from contextlib import closing

import pytest

from fp8core.config.load import load_config
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.run.build import build_base, build_environment, find_base
from fp8core.run.preflight import check_environment, check_inputs

ENVIRONMENT = """
from fp8core.environments.protocol import Outcome, Said, Tool, Turn

class Own:
    def __init__(self, *, rules="", only_for="", begun="", broken=False, says=""):
        self._rules, self._only_for, self._begun, self._broken = rules, only_for, begun, broken
        self._says = says

    def start(self, task):
        with open(self._begun, "a") as file:
            file.write(task.question + chr(10))
        if self._broken:
            return Outcome("crashed", detail="on purpose")
        rules = self._rules if self._only_for in task.question else ""
        return Turn((Said("system", rules), Said("user", task.question)))

    def step(self, action):
        if self._says:
            return Turn((Said("user", self._says),))
        return Outcome("judge")

    def close(self):
        pass
"""
SHORT = [f"What is {number} and 1?" for number in range(10, 30)]
LONG = "What is 7 and 2 and 3 and 4 and 5 and 6 and 7 and 8 and 9?"
RULES = "You get a question and answer it. " * 4


@pytest.fixture
def checked(tmp_path, small_checkpoint):
    """Check questions of a file with an environment; returns the configuration and the questions that it began.

    The trial of an observation, which begins the first question once more, is left out of these.
    """
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
        *asked, tried = begun.read_text().splitlines()
        assert tried == questions[0]
        return config, asked

    return call


def length_of(config, *messages):
    """Tokens of messages in the chat template."""
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


def test_an_episode_that_ends_at_once_is_left_to_the_run(checked):
    _, begun = checked([*SHORT, LONG], broken=True)
    assert begun == [LONG]


def written_anew(checkpoint, tmp_path, template):
    """The checkpoint with another chat template."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text(template)
    return folder


COUNTS = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
REFUSES = "{{ raise_exception('too many') if messages | length > 2 }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "error"),
    [(COUNTS, "the chat template rewrites what is before an observation: "), (REFUSES, "the chat template failed: ")],
)
def test_a_template_that_cannot_go_on_is_refused_before_the_model_is_loaded(
    checked, tmp_path, small_checkpoint, template, error
):
    folder = written_anew(small_checkpoint, tmp_path, template)
    with pytest.raises(UserError, match=rf"^{folder}: {error}"):
        checked(SHORT, settings={"model": folder}, says="Go on.")


def test_a_first_message_that_has_no_tokens_is_refused(tmp_path):
    place = tmp_path / "own.py"
    place.write_text(ENVIRONMENT)
    environment = {"name": f"{place}:Own", "options": {"begun": str(tmp_path / "begun"), "rules": "Be brief."}}
    with pytest.raises(UserError, match=r"environment\.name=.*own.py:Own begins with: the tokenizer has no token for"):
        check_inputs(load_config("tiny", {"environment": environment, "rollout.max_new_tokens": 32}))


def tried(tmp_path, line):
    """What the trial of an environment says whose `step` is this line."""
    place = tmp_path / "own.py"
    place.write_text(ENVIRONMENT.replace('return Outcome("judge")', line))
    options = {"begun": str(tmp_path / "begun")}
    config = load_config("tiny", {"environment": {"name": f"{place}:Own", "options": options}})
    base, problems = find_base(config), list(build_source(config.data, config.evaluation).to_check())
    with closing(build_environment(config.environment)) as pool:
        return check_environment(pool, config, base, problems)


def test_a_bug_in_step_is_found_without_the_policy(tmp_path):
    said = r"environment\.name=.*own\.py:Own: step, with an empty answer: .* crashed: NameError: .* \(own\.py:20\)$"
    assert re.match(said, tried(tmp_path, "return nothing"))
    assert tried(tmp_path, 'return Outcome("wrong")') is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return None", "step, with an empty answer: the environment returned NoneType, neither a Turn nor an Outcome"),
        ('return Outcome("fine")', "step, with an empty answer: outcome is 'fine'; there are: judge, "),
    ],
)
def test_an_environment_that_returns_no_reply_is_refused(tmp_path, line, said):
    with pytest.raises(UserError, match=rf"environment\.name=.*:Own: {said}"):
        tried(tmp_path, line)


def test_an_environment_that_cannot_be_made_is_refused():
    named = r"environment\.name=calculator: start: it cannot be made: ValueError: modulus=1 is no integer"
    with pytest.raises(UserError, match=named):
        check_inputs(load_config("tiny", {"environment": {"name": "calculator", "options": {"modulus": 1}}}))
