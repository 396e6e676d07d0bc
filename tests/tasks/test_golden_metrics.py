"""Values of step metrics, as worked out by hand."""

import pyarrow as pa
import pytest

from fp8core.config.load import load_config
from fp8core.metrics.episodes import turn_metrics
from fp8core.metrics.reward import reward_metrics
from fp8core.metrics.rollout import rollout_metrics
from fp8core.run.batches import baseline_mask
from fp8core.store.tables import REWARDS


def test_lengths_and_ends_of_completions():
    """The second has two tokens of a tool; the policy wrote 2, 3 and 7 tokens."""
    written = [[True] * 2, [True, False, False, True, True], [True] * 7]
    rollouts = pa.table({"written": written, "finish": ["stop", "length", "turns"]})
    entropy = pa.table({"entropy": [[0.5] * 2, [0.25, 9.0, 9.0, 0.25, 0.25], [1.0] * 7]})
    assert rollout_metrics(rollouts, entropy) == {
        "rollout/length_mean": 4.0,
        "rollout/length_max": 7.0,
        "rollout/tokens": 12.0,
        "rollout/cut_off_share": 1 / 3,
        "rollout/entropy": pytest.approx((2 * 0.5 + 3 * 0.25 + 7 * 1.0) / 12),
    }


def test_turns_of_episodes():
    """One episode of three turns, one of one turn, and one that never began."""
    spans = {0: [(0, 0, 0), (0, 2, 3), (3, 4, 6), (6, 9, 9)], 1: [(0, 0, 0), (0, 1, 1)], 2: [(0, 0, 0)]}
    turns = [
        {**{"group": 0, "sample": sample, "turn": turn, "begin": begin, "end": end, "observation_end": observation_end}}
        | {"calls": "", "malformed": "", "failed": 0, "info": ""}
        for sample, rows in spans.items()
        for turn, (begin, end, observation_end) in enumerate(rows)
    ]
    scored = pa.table(
        {
            "logprobs": pa.array([[-1.0] * 9, [-1.0], [-1.0]], pa.list_(pa.float32())),
            "finish": ["turns", "stop", "stop"],
        }
    )
    found = turn_metrics(pa.Table.from_pylist(turns), scored, scored, {})
    assert found["environment/turns_max"] == 3
    assert found["environment/turns"] == pytest.approx(4 / 3)
    assert found["environment/observation_tokens"] == 1
    assert (found["environment/ended_turns"], found["environment/ended_observation"]) == (1 / 3, 0)


def test_rewards_of_groups():
    """Of three groups one has scores that differ; one row is out of the loss."""
    scores = {0: [1.0, 1.0], 4: [1.0, 0.0], 7: [0.0, 0.0]}
    rows = [
        {"group": group, "sample": sample, "reward": score, "outcome": "right" if score else "wrong", "detail": ""}
        | {"keep": (group, sample) != (0, 1), "score": score}
        for group, values in scores.items()
        for sample, score in enumerate(values)
    ]
    rewards = pa.Table.from_pylist(rows, schema=REWARDS)
    found = reward_metrics(rewards, baseline_mask(rewards, load_config("tiny")))
    assert found["reward/mean"] == found["reward/outcome_right"] == found["reward/outcome_wrong"] == 0.5
    assert found["reward/groups_with_signal"] == 1 / 3
    assert found["reward/kept_share"] == 5 / 6
