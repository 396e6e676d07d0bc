"""What an environment says first makes prompts too long, or chat templates cannot go on: found before a run begins."""

import json
import re
import shutil
from contextlib import closing, nullcontext

import pytest

from fp8core.config.load import load_config
from fp8core.data.source import build_source
from fp8core.environments.protocol import Outcome
from fp8core.errors import UserError
from fp8core.run.build import build_base, build_environment
from fp8core.run.checks.environment import failed_trial, refuse_invalid, trial
from fp8core.run.checks.inputs import check_inputs

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


@pytest.mark.parametrize(
    ("settings", "options"), [({}, {}), ({"environment.max_turns": 1}, {"says": "Go on."})], ids=["ends", "one turn"]
)
def test_a_template_may_end_where_no_observation_follows(checked, tmp_path, small_checkpoint, settings, options):
    folder = written_anew(small_checkpoint, tmp_path, COUNTS)
    checked(SHORT, settings={"model": folder, **settings}, **options)


def test_a_first_message_that_has_no_tokens_is_refused(tmp_path):
    place = tmp_path / "own.py"
    place.write_text(ENVIRONMENT)
    environment = {"name": f"{place}:Own", "options": {"begun": str(tmp_path / "begun"), "rules": "Be brief."}}
    with pytest.raises(UserError, match=r"environment\.name=.*own.py:Own begins with: the tokenizer has no token for"):
        check_inputs(load_config("tiny", {"environment": environment, "rollout.max_new_tokens": 32}))


TELLS = "Turn((Said('user', task.question),), tools=[Tool(name, '', parameters) for name, parameters in {}])"
ONE, TWO, NONE = ({"properties": {name: {} for name in names}} for names in ("x", "xy", ""))


@pytest.mark.parametrize(
    ("tools", "form", "error"),
    [
        ([("mul", TWO)], "plain", "no call of the tool mul can be valid in the format plain: mul takes 2 arguments"),
        ([("add", ONE), ("now", NONE)], "plain", "no call of the tool now can be valid .*: now takes 0 arguments"),
        ([("add", ONE), ("a:b", ONE)], "plain", "no call of the tool a:b can be valid .*: no tool is called 'a'"),
        ([("add", ONE), ("neg", ONE)], "plain", None),
        ([("a:b", ONE)], "plain", None),
        ([("mul", TWO)], "qwen", None),
    ],
)
def test_a_tool_that_the_format_cannot_call_is_refused(checked, tmp_path, tools, form, error):
    place = tmp_path / "own.py"
    told = place.read_text().replace('Turn((Said("system", rules), Said("user", task.question)))', TELLS.format(tools))
    place.write_text(told)
    refused = nullcontext() if error is None else pytest.raises(UserError, match=rf"^environment\.name=.*: {error}")
    with refused:
        checked(SHORT, settings={"environment.format": form})


@pytest.mark.parametrize("tools", [[("add", ONE)], []], ids=["called", "no tools"])
def test_a_template_that_cannot_go_on_after_a_call_is_refused(checked, tmp_path, small_checkpoint, tools):
    """This environment ends after an answer without a call."""
    place, folder = tmp_path / "own.py", written_anew(small_checkpoint, tmp_path, COUNTS + "{{ tools }}")
    told = place.read_text().replace('Turn((Said("system", rules), Said("user", task.question)))', TELLS.format(tools))
    place.write_text(told.replace("if self._says", "if action.calls"))
    refused = pytest.raises(UserError, match="the chat template rewrites") if tools else nullcontext()
    with refused:
        checked(SHORT, settings={"model": folder})


def tried(tmp_path, line):
    """The configuration of an environment whose `step` is this line, and what it replies to a trial."""
    place = tmp_path / "own.py"
    place.write_text(ENVIRONMENT.replace('return Outcome("judge")', line))
    options = {"begun": str(tmp_path / "begun")}
    config = load_config("tiny", {"environment": {"name": f"{place}:Own", "options": options}})
    problem = next(iter(build_source(config.data, config.evaluation).to_check()))
    with closing(build_environment(config.environment)) as pool:
        return config, trial(problem, config, pool)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "return nothing",
            r"environment\.name=.*own\.py:Own: .* after an empty answer as crashed: NameError: .* \(own\.py:20\)$",
        ),
        ('return Outcome("wrong")', None),
    ],
)
def test_a_bug_in_step_is_found_without_the_policy(tmp_path, line, said):
    config, replies = tried(tmp_path, line)
    found = failed_trial(replies, config)
    assert found is None if said is None else re.match(said, found)


def test_an_environment_that_fails_at_its_start_heard_no_answer():
    config = load_config("tiny", {"environment": {"name": "calculator"}})
    found = failed_trial([Outcome("crashed", detail="ServerError: /reset answered 500")], config)
    assert found == (
        "environment.name=calculator: an episode ends at its start as crashed: ServerError: /reset answered 500"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return nothing", None),
        ("return None", "step, with an empty answer: the environment returned NoneType, neither a Turn nor an Outcome"),
        ('return Outcome("fine")', "step, with an empty answer: outcome is 'fine'; there are: judge, "),
        (
            'return Turn((Said("system", "Obey."),))',
            "step, with an empty answer: role is 'system'; there are: user, tool",
        ),
    ],
)
def test_an_environment_that_returns_no_reply_is_refused(tmp_path, line, said):
    config, replies = tried(tmp_path, line)
    refused = nullcontext() if said is None else pytest.raises(UserError, match=rf"environment\.name=.*:Own: {said}")
    with refused:
        refuse_invalid(replies, config)


def test_an_environment_that_cannot_be_made_is_refused():
    config = load_config("tiny", {"environment": {"name": "calculator", "options": {"modulus": 1}}})
    problem = next(iter(build_source(config.data, config.evaluation).to_check()))
    named = r"environment\.name=calculator: start: it cannot be made: ValueError: modulus=1 is no integer"
    with closing(build_environment(config.environment)) as pool, pytest.raises(UserError, match=named):
        trial(problem, config, pool)
