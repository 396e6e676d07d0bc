"""The rows that an update learns from."""

import pyarrow as pa
import pytest

from fp8core.config.load import load_config
from fp8core.run.update_inputs import learnt_tokens, rollout_batch
from fp8core.store.tables import LOGPROBS, REWARDS, ROLLOUTS

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


@pytest.mark.parametrize(("threshold", "kept"), [(None, [0, 1, 2, 5]), (1.3, [0, 2, 5]), (1.15, [0, 2])])
def test_metrics_are_of_the_rows_that_the_update_keeps(tables, threshold, kept):
    rollouts, rewards, logprobs = tables
    config = load_config("tiny", {"correction.seq_logprob_error_threshold": threshold})
    batch, _ = rollout_batch(rollouts, rewards, logprobs, None, config)
    learnt = learnt_tokens(rollouts, rewards, logprobs, config)
    assert learnt.any(dim=1).nonzero()[:, 0].tolist() == kept
    assert learnt.equal(batch.mask & batch.keep[:, None])


def test_old_logprobs_of_later_updates_are_of_other_policies(tables):
    rollouts, rewards, logprobs = tables
    settings = {"logprobs.source": "rollout", "correction.method": "none", "training.minibatches": 2}
    config = load_config("tiny", settings)
    assert learnt_tokens(rollouts, rewards, logprobs, config).any(dim=1).nonzero()[:, 0].tolist() == [0, 1]
    batch, _ = rollout_batch(rollouts, rewards, None, None, config)
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.equal(batch.rollout_logprobs)
