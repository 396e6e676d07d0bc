"""The metrics of an iteration, from its artifacts alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import torch

from fp8core.alignment.bounds import unverifiable
from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.metrics.episodes import turn_metrics
from fp8core.metrics.registry import find_metric
from fp8core.metrics.reward import reward_metrics, source_metrics
from fp8core.metrics.rollout import STREAM_COLUMNS, UNVERIFIABLE, draw_metrics, rollout_metrics, stream_metrics
from fp8core.metrics.scales import LAG_ERROR, SATURATED, scale_metrics
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.batch import pad_column
from fp8core.rl.correction import correction_rule
from fp8core.rl.losses import ClipRange
from fp8core.rl.staleness import lag_metrics, staleness_metrics
from fp8core.run.batches import baseline_mask, compared_rows, first_update_mask, lag_error, read_scales
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from fp8core.store.metrics import start_metrics
from fp8core.store.tables import COMPLETION_KEY, LOGPROBS, key_of, row_numbers
from fp8core.training.trainer import METRICS as TRAIN_METRICS
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
        "left": "stream",
        "next_stream": "stream",
        "schedule": "schedule",
        "turns": "turns",
        "update_rewards": "rewards",
        "visits": "visits",
        "drawn": "draws",
    },
    outputs={"metrics": "metrics"},
)
def record(run: StepContext, index: int, options: NoOptions, **artifacts: Ref) -> dict[str, Ref]:
    """With `behaviour` both policies are compared over log-probs of the versions that wrote the tokens.

    `update_rewards` has the rewards as the update read them."""
    store = run.store
    # Tokens are of one version where nothing may be stale, and the table has no column for it then.
    versions = ["versions"] if "behaviour" in artifacts and run.config.pipeline.max_staleness else []
    columns = [*COMPLETION_KEY, "tokens", "logprobs", "written", "finish", *versions]
    completions = store.get_table(artifacts["rollouts"], columns)
    reward_table = store.get_table(artifacts["rewards"])
    logprob_table = store.get_table(artifacts["logprobs"])
    learning = store.get_table(artifacts["update_rewards"]) if "update_rewards" in artifacts else reward_table
    policy_mask = pad_column(completions["written"], torch.bool, False)
    compared_mask = compared_rows(run.config, index, policy_mask)
    against = logprob_table
    if "behaviour" in artifacts:
        compared_mask, against = behind(logprob_table, store.get_table(artifacts["behaviour"]))
    turns = store.get_table(artifacts["turns"]) if "turns" in artifacts else None
    cap = correction_rule(run.config.correction).weight_cap
    # On a busy host each of hundreds of short operations would wait until all threads have had their turn. That takes a
    # second for 200,000 tokens instead of 0.1.
    with torch_threads(1):
        metrics = {
            **reward_metrics(reward_table, baseline_mask(reward_table, run.config)),
            **rollout_metrics(completions, logprob_table),
            **source_metrics(reward_table, completions, policy_mask.sum(dim=1).double().tolist()),
            **{
                f"alignment/{name}": value for name, value in mismatch(completions, against, compared_mask, cap).items()
            },
            **train_metrics(store.get_json(artifacts["train_report"])),
            **(
                age_metrics(completions, learning, logprob_table, index - 1, run.config)
                if "behaviour" in artifacts
                else {}
            ),
            **{
                f"sync/probe_{name}": value for name, value in store.get_json(artifacts["sync_report"])["probe"].items()
            },
            **scale_metrics(store.get_json(artifacts["next_scales"])),
        }
    if turns is not None:
        rows = {key: row for key, row in row_numbers(completions).items() if compared_mask[row]}
        metrics |= turn_metrics(turns, completions, against, rows)
    if "next_stream" in artifacts:
        before, after = (store.get_table(artifacts[name], STREAM_COLUMNS) for name in ("left", "next_stream"))
        metrics |= stream_metrics(before, after, store.get_json(artifacts["schedule"])["chunks"])
    if "visits" in artifacts:
        drawn = store.get_json(artifacts["drawn"])
        metrics |= draw_metrics(store.get_table(artifacts["visits"]), drawn, run.config)
    if "kv_statistics" in artifacts:
        statistics = store.get_json(artifacts["kv_statistics"])
        metrics[SATURATED.name] = statistics["saturated_share"]
        if "scales" in artifacts:
            metrics[LAG_ERROR.name] = lag_error(run.config, read_scales(run, artifacts["scales"]), statistics)
    if unverifiable(run.config):
        metrics[UNVERIFIABLE.name] = 1.0
    evaluation = store.get_json(artifacts["evaluation"])
    metrics |= start_metrics("evaluation", evaluation)
    metrics |= {f"environment/heldout_{name}": value for name, value in (evaluation.get("episodes") or {}).items()}
    own_names = [name for name in metrics if find_metric(name).own]
    assert not own_names, f"metrics without a declaration in fp8core.metrics.registry: {own_names}"
    return {"metrics": store.put_json("metrics", metrics)}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def behind(logprobs: pa.Table, behaviour: pa.Table) -> tuple[torch.Tensor, pa.Table]:
    """True for completions with log-probs of the versions that wrote them; all log-probs, with these in place."""
    newer, rows = ({key_of(row): row for row in table.to_pylist()} for table in (behaviour, logprobs))
    table = pa.Table.from_pylist([*(rows | newer).values()], LOGPROBS)
    return torch.tensor([key in newer for key in rows]), table


def age_metrics(
    rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table, newest: int, config: RunConfig
) -> dict[str, float]:
    """Age of the tokens, and by age the weights of the policy `newest` over the one that wrote a token."""
    policy_mask = pad_column(rollouts["written"], torch.bool, False)
    ages = torch.zeros(policy_mask.shape, dtype=torch.int64)
    if "versions" in rollouts.column_names:
        ages = newest - pad_column(rollouts["versions"], torch.int64, newest)
    old, sampling_logprobs = (pad_column(table["logprobs"], torch.float32, 0.0) for table in (logprobs, rollouts))
    update_mask = first_update_mask(rollouts, rewards, config)
    clip = ClipRange(low=config.loss.clip_low, high=config.loss.clip_high)
    lag = lag_metrics(old, sampling_logprobs, ages, update_mask, correction_rule(config.correction).weight_cap, clip)
    return {
        **{f"rollout/{name}": value for name, value in staleness_metrics(ages, policy_mask).items()},
        **{f"correction/{name}": value for name, value in lag.items()},
    }


def mismatch(rollouts: pa.Table, logprobs: pa.Table, rows: torch.Tensor, cap: float) -> dict[str, float]:
    """`rows`: bool [rows], those that were compared."""
    return alignment_metrics(
        pad_column(logprobs["logprobs"], torch.float32, 0.0),
        pad_column(rollouts["logprobs"], torch.float32, 0.0),
        pad_column(rollouts["written"], torch.bool, False) & rows[:, None],
        cap,
    )


def train_metrics(report: dict[str, Any]) -> dict[str, float]:
    correction_metrics = {f"correction/{name}": value for name, value in report["correction"].items()}
    update_metrics = {
        metric.name: float(report[metric.key]) for metric in TRAIN_METRICS if report.get(metric.key) is not None
    }
    return {**update_metrics, **correction_metrics}
