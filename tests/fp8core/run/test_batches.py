"""The rows that an update learns from."""

import pyarrow as pa
import pytest

from fp8core.config.load import load_config
from fp8core.run.batches import first_update_mask, observation_mask, rollout_batch
from fp8core.store.tables import LOGPROBS, REWARDS, ROLLOUTS, TURNS

# Row 1 is far from what was sampled, a filter has left out row 3, and of row 4 the policy wrote nothing.
ROWS = [
    (0.0, True, True),
    (0.5, True, True),
    (0.1, True, True),
    (0.0, False, True),
    (0.0, True, False),
    (0.2, True, True),
]


@pytest.fixture
def tables():
    rollouts, rewards, logprobs = [], [], []
    for i, (error, keep, spoken) in enumerate(ROWS):
        key = {"group": i // 3, "sample": i % 3}
        rollouts.append(
            {
                **key, "prompt_id": "p", "seed": i, "prompt_tokens": [3], "tokens": [4, 5], "logprobs": [-1.0, -2.0],
                "written": [spoken, False], "finish": "stop", "text": "",
            }
        )  # fmt: skip
        rewards.append({**key, "reward": float(i % 2), "outcome": "right", "detail": "", "keep": keep})
        # What an environment wrote counts for nothing.
        logprobs.append({**key, "logprobs": [-1.0 + error, 3.0], "entropy": [0.1, 0.1]})
    kinds = ((rollouts, ROLLOUTS), (rewards, REWARDS), (logprobs, LOGPROBS))
    return [pa.Table.from_pylist(rows, schema=schema) for rows, schema in kinds]


def test_metrics_are_of_the_rows_that_the_update_keeps(tables):
    rollouts, rewards, logprobs = tables
    config = load_config("tiny")
    batch = rollout_batch(rollouts, rewards, logprobs, {}, config)
    learnt = first_update_mask(rollouts, rewards, config)
    assert learnt.any(dim=1).nonzero()[:, 0].tolist() == [0, 1, 2, 5]
    assert learnt.equal(batch.policy_mask & batch.row_mask[:, None])


def test_old_logprobs_of_later_updates_are_of_other_policies(tables):
    rollouts, rewards, _ = tables
    settings = {"logprobs.source": "rollout", "correction.method": "none", "training.minibatches": 2}
    config = load_config("tiny", settings)
    assert first_update_mask(rollouts, rewards, config).any(dim=1).nonzero()[:, 0].tolist() == [0, 1]
    batch = rollout_batch(rollouts, rewards, None, {}, config)
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.equal(batch.rollout_logprobs)


def test_the_observation_mask_lies_between_the_end_of_a_turn_and_of_its_answer(tables):
    """Turn 0 has none of the policy's; a turn without an answer observes nothing."""
    ranges = {(1, 1): [(0, 0, 1), (1, 3, 5), (5, 6, 6)], (0, 2): [(0, 0, 0), (0, 2, 4)]}
    rows = [
        {"group": group, "sample": sample, "turn": i, "begin": begin, "end": end, "observation_end": observed}
        for (group, sample), turns in ranges.items()
        for i, (begin, end, observed) in enumerate(turns)
    ]
    found = observation_mask(tables[0], pa.Table.from_pylist(rows, schema=TURNS), 6)
    assert found.nonzero().tolist() == [[2, 2], [2, 3], [4, 0], [4, 3], [4, 4]]
