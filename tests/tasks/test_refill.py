"""Runs that draw prompts by use: others in place of groups without a signal, and retired ones less often."""

import json
import zlib
from collections import Counter
from itertools import count

import pytest

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.run.execute import StepError
from fp8core.run.refusals import graph_of
from fp8core.run.verify import verify
from fp8core.store.artifacts import RolloutShards
from fp8core.store.run_view import RunView

STEPS = 6
PROMPTS = 4
MOST = 3 * PROMPTS
RETIRE_AFTER = 2
# Half the questions are always right, and the others as the policy writes.
FUNCTION = """
import zlib

def score(prompt, completion, answer, finish):
    return float(zlib.crc32(prompt.encode()) % 2 or zlib.crc32(completion.encode()) % 2)
"""
MODES = {
    "synchronous": {},
    "one_step_off": {"pipeline.mode": "one_step_off"},
    "asynchronous": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 3, "pipeline.chunk_tokens": 2},
    "environment": {
        **{"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 2},
        **{"rollout.max_new_tokens": 28, "steps": 3},
    },
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name == "one_step_off" else []) for name in MODES],
)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def filled(loop_run, digits, mode, tmp_path_factory):
    """For reading only."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "scores.py").write_text(FUNCTION)
    rows = [json.dumps({"question": f"{number}?", "answer": "1"}) for number in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    environment = {"name": f"{digits}:Digits", "max_turns": 12, "turn_tokens": 3} if mode == "environment" else None
    return loop_run(
        mode,
        **{"data.source": str(folder / "rows.jsonl"), "rollout.retire_after": RETIRE_AFTER, "warm_start": None},
        **{"reward.verifier": f"{folder / 'scores.py'}:score", "reward.workers": 1, "environment": environment},
        **{"rollout.refill.max_batches": MOST // PROMPTS, "evaluation.prompts": 1, "pipeline.verified_share": 1.0},
        **{"steps": STEPS} | MODES[mode],
    )


def table(run, step, name):
    return run.store.get_table(run.ledger.artifacts(step)[name]).to_pylist()


def steps_of(run):
    return range(1, len(run.ledger.steps()))


def test_a_step_draws_until_it_is_full_or_at_its_bound(filled, mode):
    full = []
    for step in steps_of(filled):
        visits = table(filled, step, "visits")
        drawn = PROMPTS
        while (missing := PROMPTS - sum(visit["signal"] for visit in visits[:drawn])) > 0 and drawn < MOST:
            drawn += min(missing, MOST - drawn)
        assert [visit["group"] for visit in visits] == [*range(drawn)]
        with_signal = [visit["group"] for visit in visits if visit["signal"]]
        others = [visit["group"] for visit in visits if not visit["signal"]]
        chosen = sorted([*with_signal, *others][:PROMPTS])
        assert [visit["group"] for visit in visits if not visit["dropped"]] == chosen
        keys = [(group, sample) for group in chosen for sample in range(4)]
        for name in ("rollouts", "rewards", "advantages", "logprobs"):
            assert [(row["group"], row["sample"]) for row in table(filled, step, name)] == keys, name
        assert [row["group"] for row in table(filled, step, "prompts")] == chosen
        rewards = table(filled, step, "rewards")
        for visit in visits:
            scores = {row["score"] for row in rewards if row["group"] == visit["group"]}
            assert visit["dropped"] or visit["signal"] == (len(scores) > 1)
        assert [row["group"] in with_signal for row in rewards] == [row["keep"] for row in rewards]
        if mode != "environment":
            assert [visit["signal"] for visit in visits] == [0 < visit["reward"] < 1 for visit in visits]
        tokens = Counter()
        for row in [*table(filled, step, "rollouts"), *table(filled, step, "dropped")]:
            tokens[row["group"]] += sum(row.get("written") or [True] * len(row["tokens"]))
        assert [visit["tokens"] for visit in visits] == [tokens[group] for group in range(drawn)]
        metrics = filled.store.get_json(filled.ledger.artifacts(step)["metrics"])
        wasted = sum(tokens[group] for group in range(drawn) if group not in with_signal)
        assert metrics["rollout/wasted_share"] == pytest.approx(wasted / tokens.total())
        assert metrics["rollout/batches"] == drawn / PROMPTS
        assert metrics["rollout/groups_with_signal"] == min(PROMPTS, len(with_signal))
        assert metrics["train/rows"] == 4 * min(PROMPTS, len(with_signal))
        assert metrics["alignment/token_mult_prob_error"] == 1
        full.append((drawn, len(with_signal) == PROMPTS))
    assert max(full)[0] > PROMPTS
    assert any(is_full for _, is_full in full)


def test_no_draw_is_repeated_or_skipped_but_of_retired_prompts(filled, mode):
    """The order of data is that of the source, whatever the steps drew."""
    with filled.opened() as run:
        order = [problem.prompt_id for step in range(1, 60) for problem in run.source.training(step, PROMPTS, 0)]
    streaks, next_draw, drawn, retired_draws = Counter(), 0, [], []
    for step in steps_of(filled):
        visits = table(filled, step, "visits")
        state = filled.store.get_json(filled.ledger.artifacts(step)["drawn"])
        drawn += [visit["draw"] for visit in visits]
        assert [visit["prompt_id"] for visit in visits] == [order[visit["draw"]] for visit in visits]
        if mode == "synchronous":
            rest = (
                draw
                for draw in count(next_draw)
                if streaks[order[draw]] < RETIRE_AFTER or zlib.crc32(f"0/{draw}".encode()) % 4 == 0
            )
            assert [visit["draw"] for visit in visits] == [next(rest) for _ in visits]
        next_draw = state["next"]
        for visit in visits:
            streaks[visit["prompt_id"]] = streaks[visit["prompt_id"]] + 1 if visit["right"] else 0
        assert state["streaks"] == {prompt: streak for prompt, streak in streaks.items() if streak}
        retired = {prompt for prompt, streak in streaks.items() if streak >= RETIRE_AFTER}
        retired_draws += [draw for draw in range(next_draw) if order[draw] in retired]
        metrics = filled.store.get_json(filled.ledger.artifacts(step)["metrics"])
        assert metrics["rollout/retired_prompts"] == len(retired)
    drawn += [draw for draws in state["steps"].values() for draw in draws]
    passed_over = set(range(next_draw)) - {*drawn}
    assert len(drawn) == len({*drawn}) == next_draw - len(passed_over)
    assert passed_over <= {draw for draw in retired_draws if zlib.crc32(f"0/{draw}".encode()) % 4}
    assert passed_over or mode == "environment"


def test_a_run_killed_in_a_refill_round_plays_nothing_again_that_was_over(filled, tmp_path, monkeypatch):
    step = max(steps_of(filled), key=lambda step: len(table(filled, step, "visits")))
    run = filled.copy(tmp_path)
    run.cut_after(*((step - 1, "record") if step > 1 else (0, "draws")))
    append, lives = RolloutShards.append, [set()]

    def killed(shards, shard):
        append(shards, shard)
        lives[-1].update(zip(*(shard[name].to_pylist() for name in ("batch", "group", "sample")), strict=True))
        if len(lives) == 1 and any(place[1] >= PROMPTS for place in lives[-1]):
            lives.append(set())
            raise RuntimeError("killed")

    monkeypatch.setattr(RolloutShards, "append", killed)
    with pytest.raises(StepError, match="killed"):
        run.resume()
    run.resume()
    assert run.records == filled.records
    first, second = lives
    assert any(group < PROMPTS for _, group, _ in first)
    assert not first & second
    assert {place for place in second if place[0] == step}


def test_replays_are_equal_and_verify_finds_nothing(filled):
    outcomes = Counter(verdict.outcome for verdict in filled.replayed(steps_of(filled)))
    assert outcomes == {"equal": len(steps_of(filled))}
    assert [*verify(RunView.read(filled.folder))] == []


def test_what_cannot_fill_a_step_is_refused():
    with pytest.raises(UserError, match=r"rollout.refill: a group of rollout.group_size=1 never has a signal"):
        load_config("tiny", {"rollout.refill.max_batches": 2, "rollout.group_size": 1})
    steps = [
        {"after": "rollout", "step": {"name": "own", "uses": "tasks.reward:reward", "needs": ["prompts", "rollouts"]}}
    ]
    config = load_config("tiny", {"rollout.refill.max_batches": 2, "pipeline.insert": steps})
    with pytest.raises(UserError, match="artifact rewards: provided by two steps, rollout and own"):
        graph_of(config)
