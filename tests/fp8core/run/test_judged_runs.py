"""Runs whose rewards come from a judge: what was answered is never asked again, and a replay asks nobody."""

import json

import pytest
from judge_server import judge_server, tenths

from flows.cli import main
from fp8core.errors import UserError
from fp8core.store.layout import ANSWERS

KEY = "sk-very-secret"
TEMPLATE = "{question} {answer}? {completion}"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server() as server:
        yield server


def reward(server, **more):
    options = {"url": server.url, "model": "m", "template": TEMPLATE, "key_variable": "JUDGE_KEY", **more}
    return {"verifier": "judge", "options": options}


def settings(server, place):
    match place:
        case "main":
            return {"reward": reward(server)}
        case "refill":
            return {"reward": reward(server), "rollout": {"group_size": 2, "refill": {"max_batches": 3}}}
        case "beside":
            return {"reward": {"verifier": "chain", "others": [{"name": "taste", "weight": 0.5, **reward(server)}]}}
    in_turn = reward(server, concurrency=1)
    return {"data": [{"name": "open", "source": "chain", **in_turn}, {"name": "closed", "source": "chain"}]}


@pytest.mark.parametrize(
    ("mode", "place"),
    [("synchronous", "main"), ("one_step_off", "source"), ("asynchronous", "beside"), ("asynchronous", "refill")],
    ids=str,
)
def test_a_replay_asks_nobody_and_no_file_has_the_key(loop_run, server, monkeypatch, mode, place):
    run = loop_run("judged", steps=2, **settings(server, place), **{"pipeline.mode": mode})
    assert run.metric("alignment/token_mult_prob_error") == {1: 1.0, 2: 1.0}
    rewards = run.store.get_table(run.ledger.artifacts(2)["rewards"]).to_pylist()
    judgements = run.store.get_table(run.ledger.artifacts(2)["judgements"]).to_pylist()
    scores = [row.get("score_taste", row["score"]) for row in rewards if row.get("source") != "closed"]
    assert len({*scores}) > 2
    given = {row["score"] for row in judgements} - {0.0}
    # Refill drops groups that were judged.
    assert {*scores} - {0.0} <= given if place == "refill" else {*scores} - {0.0} == given
    described = run.records[2]["executed"]["reward"]
    for part in {"main": [], "refill": [], "beside": ["others", "taste"], "source": ["sources", "open"]}[place]:
        described = described[part]
    assert described == {"verifier": "judge", "url": server.url, "model": "m"}
    assert not any(KEY.encode() in path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    # Replies about a step that was generated ahead. The last evaluation asks in turn after them, but no judge beside:
    # the run may end before a slow server has replied.
    if place != "beside":
        assert (run.folder / ANSWERS).exists() == (mode != "synchronous")
    before = len(server.bodies)
    monkeypatch.delenv("JUDGE_KEY")
    assert [verdict.outcome for verdict in run.replayed(range(3))] == ["equal"] * 3
    assert len(server.bodies) == before
    assert main(["verify", str(run.folder)]) == 0


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
def test_equal_requests_of_a_step_have_one_reply_of_a_judge_that_changes_its_mind(loop_run, server, tmp_path, mode):
    """Steps repeat prompts and completions, also those that the step before asked about."""
    server.reply = lambda text, before: f"Score: 0.{(int(tenths(text)[-1]) + before) % 3}"
    rows = [json.dumps({"question": f"{number}+1=", "answer": "1"}) for number in range(12)]
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    few = {"name": "few", "source": str(tmp_path / "few.jsonl"), "weight": 1000.0}
    data = {"data": [few, {"name": "rest", "source": "chain", "weight": 0.001}], "evaluation.prompts": 1}
    refill = {"rollout.refill": {"max_batches": 4}, "rollout.temperature": 0.2, "pipeline.mode": mode}
    run = loop_run("changing", steps=4, reward=reward(server), **data, **refill)
    assert [verdict.outcome for verdict in run.replayed(range(1, 5))] == ["equal"] * 4


def test_an_episode_ends_by_a_judge(loop_run, server, digits):
    environment = {"name": f"{digits}:Digits", "max_turns": 12, "turn_tokens": 3}
    settings = {"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 2}
    run = loop_run("talked", steps=1, environment=environment, reward=reward(server), **settings)
    turns = run.store.get_table(run.ledger.artifacts(1)["turns"])["outcome"].to_pylist()
    assert "judge" in turns
    before = len(server.bodies)
    assert [verdict.outcome for verdict in run.replayed(range(2))] == ["equal"] * 2
    assert len(server.bodies) == before


def test_a_step_that_is_made_again_asks_nobody_and_a_lost_reply_is_asked_again(loop_run, server, tmp_path):
    run = loop_run("judged", steps=2, reward=reward(server))
    copy = run.copy(tmp_path)
    before = server.counts
    copy.file(2, "rewards").write_bytes(b"damaged")
    copy.resume()
    assert "artifacts were damaged; all of its tasks ran again" in copy.said
    assert server.counts == before
    copy.file(2, "judgements").write_bytes(b"damaged")
    copy.resume()
    assert {*(server.counts - before)} == {*before} & {*(server.counts - before)}
    assert main(["verify", str(copy.folder)]) == 0


def test_a_server_that_fails_in_mid_run_stops_it_with_one_line(loop_run, server, tmp_path):
    run = loop_run("judged", steps=1, reward=reward(server, retries=0))
    server.reply = lambda text, before: 500 if "?" in text else "x"
    with pytest.raises(UserError, match=r"step 2, task reward: reward.verifier=judge: \d+ of \d+ .* HTTP 500: refused"):
        run.resume(steps=2)
    server.reply = lambda text, before: 500
    with pytest.raises(UserError, match=r"^reward.verifier=judge: .* does not answer: HTTP 500"):
        run.resume(steps=2)


def test_a_judge_that_a_run_names_is_asked_by_no_command_without_trust(loop_run, server, capsys):
    run = loop_run("judged", steps=1, reward=reward(server))
    before = len(server.bodies)
    for command in (["resume"], ["replay", "--step", "1"], ["evaluate"]):
        assert main([command[0], str(run.folder), *command[1:]]) == 2
        asked = f"servers to ask: reward.options.url={server.url} with JUDGE_KEY; --trust"
        assert asked in capsys.readouterr().err
    assert len(server.bodies) == before
    described = json.loads((run.folder / "run.json").read_text())
    assert described["config"]["reward"]["options"]["key_variable"] == "JUDGE_KEY"
