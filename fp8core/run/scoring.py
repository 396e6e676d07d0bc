"""Rollouts as batches that a trainer scores, and its scores as stored tables."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.numerics.kv_scales import LayerAmax, LayerScales, scale_distance, scales_from_statistics
from fp8core.rl.batch import TokenBatch, column, drawn_rows, routes
from fp8core.rollout.engine import PolicyScales
from fp8core.run.context import RunContext
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COMPLETION_KEY, LOGPROBS
from fp8core.training.trainer import ScoredBatch, Trainer


def scales_of(config: RunConfig, amax: list[LayerAmax]) -> list[LayerScales]:
    return scales_from_statistics(amax, config.calibration.margin, config.precision.recipe.cache)


def lag_error(config: RunConfig, in_force: PolicyScales, statistics: dict[str, Any]) -> float:
    """Distance of a step's scales from those its own statistics give, in powers of two (`scale_distance`)."""
    fresh = scales_of(config, read_amax(statistics))
    return scale_distance(in_force.layers, fresh)


def store_scales(run: RunContext, version: int, amax: list[LayerAmax]) -> Ref:
    content: dict[str, Any] = {
        "version": version,
        "rule": run.config.precision.recipe.cache,
        "layers": [vars(layer) for layer in scales_of(run.config, amax)],
        "amax": [vars(layer) for layer in amax],
    }
    return run.directory.store.put_json("scales", content)


def read_scales(run: RunContext, scales: Ref) -> PolicyScales:
    content = run.directory.store.get_json(scales)
    return PolicyScales(content["version"], tuple(LayerScales(**layer) for layer in content["layers"]))


def read_amax(content: dict[str, Any]) -> list[LayerAmax]:
    """Of stored statistics, or scales."""
    return [LayerAmax(**layer) for layer in content["amax"]]


SCORED_COLUMNS = (*COMPLETION_KEY, "prompt_tokens", "tokens", "experts")
"""Columns of rollouts that are scored; there are experts where the rollout recorded them."""


def trainer_of_policy(run: RunContext, policy: Ref) -> Trainer:
    run.sleep_engine()
    trainer = run.ready_trainer()
    version = run.directory.store.get_json(policy)["version"]
    assert trainer.version == version, "the trainer does not hold the policy of this step"
    return trainer


def stored_scores(run: RunContext, version: int, rollouts: pa.Table, scored: ScoredBatch) -> dict[str, Ref]:
    """Log-probs and statistics of Q, K and V under a version of the policy, as artifacts."""
    store = run.directory.store
    statistics = {
        "version": version,
        "amax": [vars(layer) for layer in scored.statistics.amax()],
        "saturated_share": scored.statistics.saturated_share(),
    }
    return {
        "logprobs": store.put_table("logprobs", logprob_table(rollouts, scored)),
        "kv_statistics": store.put_json("kv_statistics", statistics),
    }


def compared_rows(config: RunConfig, index: int, written: Tensor) -> Tensor:
    """bool [rows]: completions whose log-probs under both policies are compared; with `logprobs.source` rollout a
    share.

    `written`: bool [rows, longest], True where the policy wrote a token."""
    if config.logprobs.source != "rollout":
        return torch.ones(len(written), dtype=torch.bool)
    compared = torch.zeros(len(written), dtype=torch.bool)
    compared[drawn_rows(written, config.logprobs.audit_share, f"audit/{config.seed}/{index}")] = True
    return compared


def token_batch(rollouts: pa.Table) -> TokenBatch:
    return TokenBatch.of(rollouts["prompt_tokens"].to_pylist(), rollouts["tokens"].to_pylist())


def policy_batch(rollouts: pa.Table) -> TokenBatch:
    """Rollouts as padded tokens for the policy that is trained, with the experts to replay; a reference chooses its
    own."""
    prompts, completions = (rollouts[name].to_pylist() for name in ("prompt_tokens", "tokens"))
    experts = routes(rollouts["experts"]) if "experts" in rollouts.column_names else None
    return TokenBatch.of(prompts, completions, experts)


def logprob_table(rollouts: pa.Table, scored: ScoredBatch) -> pa.Table:
    lengths = pc.list_value_length(rollouts["tokens"]).to_numpy().astype(np.int64)
    columns = {
        "group": rollouts["group"],
        "sample": rollouts["sample"],
        "logprobs": column(scored.logprobs, lengths),
        "entropy": column(scored.entropy, lengths),
    }
    return pa.table(columns, schema=LOGPROBS)
