"""A judge asks a server: what it sends, what it reads in replies, and what it does about a server that fails."""

import json
from contextlib import closing

import pytest
from judge_server import TRIAL, judge_server
from pydantic import ValidationError

from fp8core.config.load import load_config
from fp8core.config.reward import RewardConfig
from fp8core.config.run import own_code
from fp8core.errors import UserError
from fp8core.rewards import judge
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier
from fp8core.run.rollouts import failures

TEMPLATE = "{question} should be {answer} in {unit}: {completion} Write {as JSON}."
KEY = "sk-very-secret"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(judge, "_FIRST_WAIT_SECONDS", 0.01)
    with judge_server() as server:
        yield server


def options(server, **more):
    return {"url": server.url, "model": "m", "template": "{completion}", "key_variable": "JUDGE_KEY", **more}


def asked(server, completions, finish="stop", **more):
    config = RewardConfig(verifier="judge", options=options(server, **more))
    with closing(build_verifier(config)) as verifier:
        messages = json.dumps([["system", "Be brief."], ["user", "1 + 1?"]])
        return verifier.verify(
            [ScoreRequest("<p>", text, "2", finish, '{"unit": "kg"}', "", messages) for text in completions]
        )


def test_a_request_has_the_fields_of_the_row_and_the_key(server):
    asked(server, ["{answer} is 2"], template=TEMPLATE, max_tokens=7, body={"seed": 3, "temperature": None})
    trial, request = server.bodies
    assert trial["messages"][0]["content"] == TRIAL
    text = "1 + 1? should be 2 in kg: {answer} is 2 Write {as JSON}."
    messages = [{"role": "user", "content": text}]
    assert request == {"model": "m", "messages": messages, "max_tokens": 7, "seed": 3}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("reply", "score", "outcome", "detail"),
    [
        ("Score: 10", 1.0, "right", ""),
        ("score 3, no: **Score**: 8.5", 0.85, "right", ""),
        ("Score: 4\nwrong unit", 0.4, "wrong", "score 4: Score: 4 wrong unit"),
        ("Score: 11", 0.0, "unparsed", "11 is not a score: Score: 11"),
        ("I cannot say.", 0.0, "unparsed", "no score in 'I cannot say.'"),
        (f"Score: 4 for {KEY}", 0.4, "wrong", "score 4: Score: 4 for ***"),
    ],
)
def test_the_last_match_in_a_reply_is_the_score(server, reply, score, outcome, detail):
    server.reply = lambda text, before: reply
    (verdict,) = asked(server, ["x"], highest=10, right_from=8)
    assert (verdict.score, verdict.outcome, verdict.detail) == (score, outcome, detail)
    (judgement,) = verdict.judgements
    assert (judgement.reply, judgement.score) == (reply.replace(KEY, "***"), score)


def test_a_completion_that_was_cut_off_is_not_sent(server):
    (verdict,) = asked(server, ["x"], finish="length")
    assert (verdict.outcome, verdict.judgements, server.counts) == ("unparsed", (), {})


def test_a_server_that_is_busy_fails_or_is_slow_is_asked_again(server):
    statuses = {"busy": 429, "broken": 500}
    server.reply = lambda text, before: statuses[text] if text in statuses and before < 2 else "Score: 1"
    verdicts = asked(server, ["busy", "broken", "x"], retries=2)
    assert [verdict.outcome for verdict in verdicts] == ["right"] * 3
    assert server.counts == {"busy": 3, "broken": 3, "x": 1}
    server.reply = lambda text, before: 503 if text == "broken" else 400 if text == "long" else "Score: 1"
    broken, long, fine = asked(server, ["broken", "long", "y"], retries=1)
    assert (broken.outcome, broken.detail) == ("crashed", "HTTP 503: refused Bearer ***")
    assert (long.outcome, fine.outcome) == ("crashed", "right")
    assert (server.counts["broken"], server.counts["long"]) == (5, 1)


def test_no_reply_is_a_timeout_and_no_more_are_asked_at_once_than_allowed(server):
    server.seconds = 0.05
    asked(server, map(str, range(12)), concurrency=3)
    assert server.most_at_once == 3
    late = options(server, timeout_seconds=0.4, retries=0)
    with closing(build_verifier(RewardConfig(verifier="judge", options=late))) as verifier:
        server.seconds = 1.0
        (verdict,) = verifier.verify([ScoreRequest("?", "late", "2", "stop")])
    assert (verdict.outcome, verdict.detail) == ("timeout", "no reply after 0.4 s")
    config = load_config("tiny", {"reward": {"verifier": "judge", "options": options(server)}})
    with pytest.raises(UserError, match=r"^reward.verifier=judge: 1 of 1 answers could not be checked \(1 timed out\)"):
        failures(config, [verdict])


def test_a_server_that_refuses_all_is_one_line_without_the_key(server, monkeypatch):
    server.reply = lambda text, before: 401
    with pytest.raises(UserError, match=r"HTTP 401: refused Bearer \*\*\*; set JUDGE_KEY to a key that it takes$"):
        asked(server, ["x"])
    with pytest.raises(UserError, match=r"HTTP 404: .*; set reward.options.url to the part before /chat/completions"):
        asked(server, ["x"], url=f"{server.url}/v2")
    with pytest.raises(
        UserError, match=r"^reward.verifier=judge: http://no.invalid/v1 does not answer: ConnectError: "
    ):
        asked(server, ["x"], url="http://no.invalid/v1")
    for value, fault in (("", "is not set"), (f"{KEY}\u00e9", "holds what no key has")):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(UserError, match=f"^reward.options.key_variable=JUDGE_KEY: the .* variable {fault}$"):
            asked(server, ["x"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "{question}"}, r"template: the text has no \{completion\}"),
        ({"pattern": "score"}, "pattern: it has 0 groups"),
        ({"pattern": "("}, "pattern: no regular expression"),
        ({"lowest": 1}, "lowest=1 is not below highest=1"),
        ({"right_from": 2}, "right_from=2 is not from 0 to 1"),
        ({"url": "https://me:pw@host/v1"}, "url: it has a password or a token"),
        ({"key_variable": "sk-123"}, "key_variable: it is no name of an environment variable"),
        ({"retry": 3}, "retry: unknown key; did you mean retries"),
    ],
)
def test_options_that_cannot_be_meant(changes, message):
    settings = {"url": "http://h/v1", "model": "m", "template": "{completion}", **changes}
    with pytest.raises(ValidationError, match=f"options: {message}") as caught:
        RewardConfig(verifier="judge", options=settings)
    assert "sk-123" not in str(caught.value).partition("[type=")[0]


def test_a_template_names_columns_and_a_stored_url_needs_trust():
    settings = {"url": "http://h/v1", "model": "m", "template": "{completion} {unit}", "key_variable": "JUDGE_KEY"}
    other = {"name": "taste", "verifier": "judge", "options": settings}
    with pytest.raises(
        UserError, match=r"reward.others.taste.options.template: \{unit\} is none of answer, completion"
    ):
        load_config("tiny", {"reward.others": [other]})
    other["options"]["template"] = "{completion}"
    assert own_code(load_config("tiny", {"reward.others": [other]})) == {
        "reward.others.taste.options.url": "http://h/v1 with JUDGE_KEY"
    }
