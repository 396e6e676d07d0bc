"""One GRPO update from stored rollouts, rewards and log-probs."""

from dataclasses import asdict, replace

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.rl.advantages import ESTIMATORS
from fp8core.rl.batch import RolloutBatch
from fp8core.rl.columns import padded
from fp8core.rl.objective import Objective
from fp8core.store.artifacts import Ref
from fp8core.workers.live import LiveRun
from tasks.calibrate import read_scales
from tasks.logprobs import REPLAYED, layer_scales, replay_batch
from tasks.reward import check_reward
from tasks.step import step


@step(
    inputs={
        "rollouts": "rollouts",
        "rewards": "rewards",
        "logprobs": "logprobs",
        "policy": "policy",
        "scales": "scales",
    },
    optional_inputs={"reference": "logprobs"},
    outputs={"next_policy": "policy", "train_report": "train_report"},
    redo=True,
)
def train(
    run: LiveRun,
    index: int,
    options: NoOptions,
    rollouts: Ref,
    rewards: Ref,
    logprobs: Ref,
    policy: Ref,
    scales: Ref,
    reference: Ref | None = None,
) -> dict[str, Ref]:
    """Policy v_i becomes v_{i+1}."""
    store = run.directory.store
    trainer = run.ready_trainer()
    assert trainer.version == store.get_json(policy)["version"], "the trainer does not hold the policy of this step"
    batch = rollout_batch(
        store.get_table(rollouts, [*REPLAYED, "written", "logprobs"]),
        store.get_table(rewards),
        store.get_table(logprobs),
        store.get_table(reference) if reference else None,
        run.config,
    )
    report = trainer.step(batch, run.config.rollout.temperature, layer_scales(read_scales(run, scales)))
    return {
        "next_policy": store.put_json("policy", {"version": report.version, "weights_digest": report.digest}),
        "train_report": store.put_json("train_report", asdict(report)),
    }


def rollout_batch(
    rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table, reference: pa.Table | None, config: RunConfig
) -> RolloutBatch:
    """Stored tables as the batch an update learns from; rows of all tables correspond.

    Raises:
        UserError: a reward is not finite (a step of the user's own may have made it).
    """
    for row in rewards.select(["group", "sample", "reward"]).to_pylist():
        check_reward(row["reward"], row["group"], row["sample"])
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = torch.tensor(rewards["group"].to_pylist())
    batch = RolloutBatch(
        sequences=replay_batch(rollouts),
        mask=padded(rollouts["written"], torch.bool, False),
        rollout_logprobs=padded(rollouts["logprobs"], torch.float32, 0.0),
        old_logprobs=padded(logprobs["logprobs"], torch.float32, 0.0),
        reference_logprobs=padded(reference["logprobs"], torch.float32, 0.0) if reference else None,
        advantages=torch.zeros(len(values)),
        keep=torch.tensor(rewards["keep"].to_pylist()),
    )
    estimate = ESTIMATORS[config.loss.advantage]
    advantages = estimate(values, groups, config.loss.advantage_epsilon, baseline_rows(batch, config))
    return replace(batch, advantages=advantages.float())


def baseline_rows(batch: RolloutBatch, config: RunConfig) -> Tensor:
    """bool [B]: rows whose rewards make the baseline of their group, by `correction.baseline`."""
    if config.correction.baseline == "all":
        return torch.ones_like(batch.keep)
    corrected, _ = Objective(config.loss, config.correction).corrected(batch)
    return corrected.mask.any(dim=1)
