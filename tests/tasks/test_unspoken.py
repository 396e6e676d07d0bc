"""Steps in which most episodes end before the policy speaks: what is drawn for a comparison has a token to compare."""

import re

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.run.scoring import compared_rows

SHORT = """
from fp8core.environments.protocol import Outcome, Said, Turn

class Short:
    def start(self, task):
        if task.seed % 4:
            return Outcome("wrong", detail="nothing to do")
        return Turn((Said("user", task.question),))

    def step(self, action):
        return Outcome("judge")

    def close(self):
        pass
"""
MODES = {
    "ahead": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 12, "pipeline.chunk_tokens": 4},
    "audited": {"logprobs.source": "rollout"},
}


@pytest.fixture
def short_run(loop_run, tmp_path):
    """Runs of so many steps by their mode."""
    place = tmp_path / "short.py"
    place.write_text(SHORT)

    def run(mode, steps):
        return loop_run(
            f"unspoken-{mode}-{steps}",
            **{"environment": {"name": f"{place}:Short", "max_turns": 2, "turn_tokens": 3}, "steps": steps},
            **{"rollout.max_new_tokens": 28, "rollout.group_size": 4, "rollout.prompts_per_step": 4},
            **MODES[mode],
        )

    return run


@pytest.mark.parametrize("mode", MODES)
def test_a_comparison_draws_episodes_in_which_the_policy_spoke(short_run, mode):
    run = short_run(mode, steps=4)
    unspoken = 0
    for index in range(1, 5):
        artifacts = run.ledger.artifacts(index)
        rollouts = run.store.get_table(artifacts["rollouts"]).to_pylist()
        silent = {(row["group"], row["sample"]) for row in rollouts if not any(row["written"])}
        unspoken += len(silent)
        assert run.store.get_json(artifacts["metrics"])["alignment/tokens"] > 0
        if mode == "ahead":
            verified = run.store.get_table(artifacts["behaviour"]).to_pylist()
            assert not silent & {(row["group"], row["sample"]) for row in verified}
    assert unspoken > 32, "most of the 64 episodes are of this kind"


@pytest.mark.parametrize("mode", MODES)
def test_how_episodes_of_a_step_ended_is_told_once(short_run, mode):
    run = short_run(mode, steps=1)
    run.resume(steps=4)
    told = re.findall(r"(rollouts.*): \d+ of 16 episodes ended before the policy's first turn", run.said)
    ahead = [f"rollouts of step {step}" for step in (3, 4, 5)]
    assert told == (ahead if mode == "ahead" else ["rollouts"] * 3)


def test_without_such_episodes_the_draw_is_that_of_all_rows():
    config = load_config("tiny", {"logprobs.source": "rollout", "logprobs.audit_share": 0.25})
    everyone = torch.ones(16, 3, dtype=torch.bool)
    drawn = compared_rows(config, 1, everyone).nonzero()[:, 0].tolist()
    assert drawn == [2, 9, 11, 13], "as in stored runs"
    some = everyone.clone()
    some[drawn[0]] = False
    others = compared_rows(config, 1, some).nonzero()[:, 0].tolist()
    assert drawn[0] not in others
    assert set(drawn[1:]) <= set(others)
