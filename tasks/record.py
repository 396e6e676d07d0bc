"""The metrics of an iteration, from its artifacts alone."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fp8core.alignment.bounds import contract_of
from fp8core.alignment.metrics import alignment_metrics
from fp8core.config.steps import NoOptions
from fp8core.rewards.scorer import OUTCOMES
from fp8core.rl.batch import padded
from fp8core.run.context import RunContext
from fp8core.run.policy import read_scales
from fp8core.store.artifacts import Ref
from fp8core.store.tables import LOGPROBS, SCORE
from fp8core.training.trainer import REPORTED
from tasks.calibrate import lag_error
from tasks.logprobs import compared_rows
from tasks.step import step


@step(
    inputs={
        "rollouts": "rollouts",
        "rewards": "rewards",
        "logprobs": "logprobs",
        "train_report": "train_report",
        "sync_report": "sync_report",
        "evaluation": "evaluation",
        "next_scales": "scales",
    },
    optional_inputs={
        "kv_statistics": "kv_statistics",
        "scales": "scales",
        "behaviour": "behaviour",
        "schedule": "schedule",
        "evictions": "evictions",
    },
    outputs={"metrics": "metrics"},
)
def record(
    run: RunContext,
    index: int,
    options: NoOptions,
    rollouts: Ref,
    rewards: Ref,
    logprobs: Ref,
    train_report: Ref,
    sync_report: Ref,
    evaluation: Ref,
    next_scales: Ref,
    kv_statistics: Ref | None = None,
    scales: Ref | None = None,
    behaviour: Ref | None = None,
    schedule: Ref | None = None,
    evictions: Ref | None = None,
) -> dict[str, Ref]:
    """Everything in MLflow about the step but its timings.

    With `behaviour` both policies are compared where these log-probs are: of the versions that wrote the tokens.
    """
    store = run.directory.store
    completions, scored = store.get_table(rollouts), store.get_table(logprobs)
    compared, against = compared_rows(run.config, index, len(completions)), scored
    if behaviour is not None:
        compared, against = behind(scored, store.get_table(behaviour))
    # On a busy host each of hundreds of short operations would wait until all threads have had their turn. That takes a
    # second for 200,000 tokens instead of 0.1 (benchmarks/host_costs.py).
    with torch_threads(1):
        metrics = {
            **reward_metrics(store.get_table(rewards)),
            **rollout_metrics(completions, scored),
            **{f"alignment/{name}": value for name, value in mismatch(completions, against, compared).items()},
            **({} if behaviour is None else staleness_metrics(completions, index - 1)),
            **train_metrics(store.get_json(train_report)),
            **{f"sync/probe_{name}": value for name, value in store.get_json(sync_report)["probe"].items()},
            **scale_metrics(store.get_json(next_scales)),
        }
    if kv_statistics is not None:
        statistics = store.get_json(kv_statistics)
        metrics["kv/saturated_share"] = statistics["saturated_share"]
        if scales is not None:
            metrics["kv/lag_error"] = lag_error(run.config, read_scales(run, scales), statistics)
    if contract_of(run.config)[0] == "unverifiable":
        metrics["rollout/unverifiable"] = 1.0
    if schedule is not None:
        metrics["rollout/ahead_tokens"] = float(sum(store.get_json(schedule)["chunks"]))
    if evictions is not None:
        evicted = store.get_json(evictions)
        metrics["rollout/evicted_prompts"] = float(len(evicted))
        metrics["rollout/evicted_tokens"] = float(sum(each["tokens"] for each in evicted))
    measured = store.get_json(evaluation)
    if measured:
        metrics["reward/heldout_accuracy"] = measured["accuracy"]
        metrics["reward/heldout_length_mean"] = measured["length_mean"]
    return {"metrics": store.put_json("metrics", metrics)}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reward_metrics(rewards: pa.Table) -> dict[str, float]:
    """Mean, spread, share of each outcome, share of groups whose rewards differ, and the mean of each verifier."""
    values = torch.tensor(rewards["reward"].to_pylist(), dtype=torch.float64)
    groups = rewards.group_by("group").aggregate([("reward", "max"), ("reward", "min")])
    mixed = sum(row["reward_max"] > row["reward_min"] for row in groups.to_pylist())
    outcomes = Counter(rewards["outcome"].to_pylist())
    return {
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std(correction=0)),
        "reward/groups_with_signal": mixed / groups.num_rows,
        "reward/kept_share": sum(rewards["keep"].to_pylist()) / rewards.num_rows,
        **{f"reward/outcome_{name}": outcomes[name] / rewards.num_rows for name in OUTCOMES},
        **{
            f"reward/{name.removeprefix(SCORE)}": float(np.mean(rewards[name].to_numpy()))
            for name in rewards.column_names
            if name.startswith(SCORE)
        },
    }


def rollout_metrics(rollouts: pa.Table, logprobs: pa.Table) -> dict[str, float]:
    """Lengths, how completions ended, and the entropy of the policy (nats), over the tokens it wrote."""
    written = padded(rollouts["written"], torch.bool, False)
    lengths = written.sum(dim=1).double()
    entropy = padded(logprobs["entropy"], torch.float64, 0.0)
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/cut_off_share": rollouts["finish"].to_pylist().count("length") / rollouts.num_rows,
        "rollout/entropy": float(entropy[written].mean()),
    }


def behind(logprobs: pa.Table, behaviour: pa.Table) -> tuple[torch.Tensor, pa.Table]:
    """Which completions have log-probs of the versions that wrote them, and the log-probs with these in place."""
    by_place = {(row["group"], row["sample"]): row for row in behaviour.to_pylist()}
    rows = {(row["group"], row["sample"]): row for row in logprobs.to_pylist()}
    replaced = pa.Table.from_pylist([*(rows | by_place).values()], LOGPROBS)
    return torch.tensor([place in by_place for place in rows]), replaced


def staleness_metrics(rollouts: pa.Table, newest: int) -> dict[str, float]:
    """How many versions older than the newest policy the one is that wrote a token."""
    if "versions" not in rollouts.column_names:
        return {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}
    versions, written = padded(rollouts["versions"], torch.int64, 0), padded(rollouts["written"], torch.bool, False)
    ages = (newest - versions[written]).double()
    return {"rollout/staleness_mean": float(ages.mean()), "rollout/staleness_max": float(ages.max())}


def mismatch(rollouts: pa.Table, logprobs: pa.Table, rows: torch.Tensor) -> dict[str, float]:
    """Every alignment metric between the policy that sampled and the policy that trains, over the tokens it wrote.

    `rows`: bool [rows], those that were compared (`tasks.logprobs.compared_rows`).
    """
    return alignment_metrics(
        padded(logprobs["logprobs"], torch.float32, 0.0),
        padded(rollouts["logprobs"], torch.float32, 0.0),
        padded(rollouts["written"], torch.bool, False) & rows[:, None],
    )


def train_metrics(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of a train report."""
    corrected = {f"correction/{name}": value for name, value in report["correction"].items()}
    trained = {f"train/{name}": float(report[name]) for name in REPORTED}
    if report["first_reward_slope"] is not None:
        trained["train/first_reward_slope"] = report["first_reward_slope"]
    return {**trained, **corrected}


def scale_metrics(scales: dict[str, Any]) -> dict[str, float]:
    """Scales and amax per layer."""
    return {
        f"kv/{part}_{kind}_layer{i}": value
        for part, rows in (("scale", scales["layers"]), ("amax", scales["amax"]))
        for i, layer in enumerate(rows)
        for kind, value in layer.items()
    }
