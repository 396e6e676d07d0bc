"""The metrics of an iteration, from its artifacts alone."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fp8core.alignment.bounds import unverifiable
from fp8core.config.run import RunConfig
from fp8core.config.steps import NoOptions
from fp8core.rewards.scorer import OUTCOMES, Key
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.batch import padded
from fp8core.rl.losses import ClipRange
from fp8core.rl.presets import correction_rule
from fp8core.rl.staleness import lag_metrics, staleness_metrics
from fp8core.run.batches import (
    baseline_mask,
    compared_rows,
    first_update_mask,
    lag_error,
    read_scales,
    rows_with_signal,
)
from fp8core.run.context import StepContext
from fp8core.run.episodes import episode_means
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COMPLETION_KEY, LOGPROBS, SCORE, key_of, row_numbers, scores_of
from fp8core.training.trainer import REPORTED
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
        "learnt": "rewards",
    },
    outputs={"metrics": "metrics"},
)
def record(run: StepContext, index: int, options: NoOptions, **artifacts: Ref) -> dict[str, Ref]:
    """With `behaviour` both policies are compared over log-probs of the versions that wrote the tokens.

    `learnt` has the rewards as the update read them."""
    store = run.store
    # Tokens are of one version where nothing may be stale, and the table has no column for it then.
    versions = ["versions"] if "behaviour" in artifacts and run.config.pipeline.max_staleness else []
    columns = [*COMPLETION_KEY, "tokens", "logprobs", "written", "finish", *versions]
    completions = store.get_table(artifacts["rollouts"], columns)
    rewarded, scored = store.get_table(artifacts["rewards"]), store.get_table(artifacts["logprobs"])
    learning = store.get_table(artifacts["learnt"]) if "learnt" in artifacts else rewarded
    policy_mask = padded(completions["written"], torch.bool, False)
    compared, against = compared_rows(run.config, index, policy_mask), scored
    if "behaviour" in artifacts:
        compared, against = behind(scored, store.get_table(artifacts["behaviour"]))
    played = store.get_table(artifacts["turns"]) if "turns" in artifacts else None
    cap = correction_rule(run.config.correction).weight_cap
    # On a busy host each of hundreds of short operations would wait until all threads have had their turn. That takes a
    # second for 200,000 tokens instead of 0.1.
    with torch_threads(1):
        metrics = {
            **reward_metrics(rewarded, run.config),
            **rollout_metrics(completions, scored),
            **{f"alignment/{name}": value for name, value in mismatch(completions, against, compared, cap).items()},
            **train_metrics(store.get_json(artifacts["train_report"])),
            **(age_metrics(completions, learning, scored, index - 1, run.config) if "behaviour" in artifacts else {}),
            **{
                f"sync/probe_{name}": value for name, value in store.get_json(artifacts["sync_report"])["probe"].items()
            },
            **scale_metrics(store.get_json(artifacts["next_scales"])),
        }
    if played is not None:
        rows = {key: row for key, row in row_numbers(completions).items() if compared[row]}
        metrics |= turn_metrics(played, completions, against, rows)
    if "next_stream" in artifacts:
        columns = STREAM_COLUMNS if run.config.environment is None else [*STREAM_COLUMNS, "written"]
        before, after = (store.get_table(artifacts[name], columns) for name in ("left", "next_stream"))
        metrics |= stream_metrics(before, after, store.get_json(artifacts["schedule"])["chunks"])
    if "kv_statistics" in artifacts:
        statistics = store.get_json(artifacts["kv_statistics"])
        metrics["kv/saturated_share"] = statistics["saturated_share"]
        if "scales" in artifacts:
            metrics["kv/lag_error"] = lag_error(run.config, read_scales(run, artifacts["scales"]), statistics)
    if unverifiable(run.config):
        metrics["rollout/unverifiable"] = 1.0
    measured = store.get_json(artifacts["evaluation"])
    if measured:
        metrics["reward/heldout_accuracy"] = measured["accuracy"]
        metrics["reward/heldout_length_mean"] = measured["length_mean"]
        metrics |= {f"environment/heldout_{name}": value for name, value in (measured.get("episodes") or {}).items()}
    return {"metrics": store.put_json("metrics", metrics)}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reward_metrics(rewards: pa.Table, config: RunConfig) -> dict[str, float]:
    """Spread and signal are those of `baseline_mask`."""
    values, scores = (
        torch.tensor(column.to_pylist(), dtype=torch.float64) for column in (rewards["reward"], scores_of(rewards))
    )
    groups = torch.tensor(rewards["group"].to_pylist())
    baseline = baseline_mask(rewards, config)
    spread = float(scores[baseline].std(correction=0)) if baseline.any() else 0.0
    mixed = groups[rows_with_signal(rewards, baseline)]
    outcomes = Counter(rewards["outcome"].to_pylist())
    return {
        "reward/mean": float(values.mean()),
        # A replay may find that all episodes failed.
        "reward/std": float(values[baseline].std(correction=0)) if baseline.any() else 0.0,
        **({"reward/score_std": spread} if "score" in rewards.column_names else {}),
        "reward/groups_with_signal": len(mixed.unique()) / len(groups.unique()),
        "reward/kept_share": sum(rewards["keep"].to_pylist()) / rewards.num_rows,
        **{f"reward/outcome_{name}": outcomes[name] / rewards.num_rows for name in OUTCOMES},
        **{
            f"reward/{name.removeprefix(SCORE)}": float(np.mean(rewards[name].to_numpy()))
            for name in rewards.column_names
            if name.startswith(SCORE)
        },
    }


def rollout_metrics(rollouts: pa.Table, logprobs: pa.Table) -> dict[str, float]:
    policy_mask = padded(rollouts["written"], torch.bool, False)
    lengths = policy_mask.sum(dim=1).double()
    entropy = padded(logprobs["entropy"], torch.float64, 0.0)
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/cut_off_share": rollouts["finish"].to_pylist().count("length") / rollouts.num_rows,
        "rollout/entropy": float(entropy[policy_mask].mean()),
    }


def turn_metrics(turns: pa.Table, rollouts: pa.Table, logprobs: pa.Table, rows: Mapping[Key, int]) -> dict[str, float]:
    """`rows`: key -> row in `rollouts` and `logprobs`, of completions that are compared."""
    table = turns.to_pylist()
    episodes = [list(group) for _, group in groupby(table, key_of)]
    # An episode that never began has a token in place of all that, which the environment did not write.
    observed = [
        rows_of[-1]["observation_end"] - sum(row["end"] - row["begin"] for row in rows_of)
        for rows_of in episodes
        if rows_of[-1]["turn"]
    ]
    told: dict[str, list[float]] = {}
    for row in table:
        for name, value in json.loads(row["info"] or "{}").items():
            told.setdefault(name, []).append(value)
    finishes = Counter(rollouts["finish"].to_pylist())
    return {
        **{f"environment/{name}": value for name, value in episode_means(episodes).items()},
        "environment/turns_max": float(max(rows_of[-1]["turn"] for rows_of in episodes)),
        "environment/observation_tokens": sum(observed) / len(episodes),
        **{f"environment/ended_{name}": finishes[name] / len(episodes) for name in ("turns", "observation")},
        **{f"environment/info_{name}": sum(values) / len(values) for name, values in sorted(told.items())},
        **mismatch_by_turn(table, rollouts, logprobs, rows),
    }


def mismatch_by_turn(
    turns: Sequence[Mapping[str, Any]],
    rollouts: pa.Table,
    logprobs: pa.Table,
    rows: Mapping[Key, int],
) -> dict[str, float]:
    """By turns 1, 2 to 3, 4 to 7, ... of episodes."""
    sampled, trained = (padded(table["logprobs"], torch.float32, 0.0) for table in (rollouts, logprobs))
    apart = (sampled.double() - trained.double()).abs()
    differ = sampled.view(torch.int32) != trained.view(torch.int32)
    largest, differing = dict[str, float](), Counter[str]()
    for turn in turns:
        row = rows.get(key_of(turn))
        if row is None or turn["begin"] == turn["end"]:
            continue
        tokens, first = slice(turn["begin"], turn["end"]), 1 << turn["turn"].bit_length() - 1
        name = f"turn_{first}" if first == 1 else f"turn_{first}_{2 * first - 1}"
        largest[name] = max(largest.get(name, 0.0), float(apart[row, tokens].max()))
        differing[name] += int(differ[row, tokens].sum())
    return {
        **{f"alignment/logprob_abs_diff_max_{name}": value for name, value in largest.items()},
        **{f"alignment/tokens_differing_{name}": float(differing[name]) for name in largest},
    }


def behind(logprobs: pa.Table, behaviour: pa.Table) -> tuple[torch.Tensor, pa.Table]:
    """True for completions with log-probs of the versions that wrote them; all log-probs, with these in place."""
    newer, rows = ({key_of(row): row for row in table.to_pylist()} for table in (behaviour, logprobs))
    replaced = pa.Table.from_pylist([*(rows | newer).values()], LOGPROBS)
    return torch.tensor([key in newer for key in rows]), replaced


def age_metrics(
    rollouts: pa.Table, rewards: pa.Table, logprobs: pa.Table, newest: int, config: RunConfig
) -> dict[str, float]:
    """Age of the tokens, and by age the weights of the policy `newest` over the one that wrote a token."""
    policy_mask = padded(rollouts["written"], torch.bool, False)
    ages = torch.zeros(policy_mask.shape, dtype=torch.int64)
    if "versions" in rollouts.column_names:
        ages = newest - padded(rollouts["versions"], torch.int64, newest)
    old, sampled = (padded(table["logprobs"], torch.float32, 0.0) for table in (logprobs, rollouts))
    updated = first_update_mask(rollouts, rewards, config)
    clip = ClipRange(low=config.loss.clip_low, high=config.loss.clip_high)
    lag = lag_metrics(old, sampled, ages, updated, correction_rule(config.correction).weight_cap, clip)
    return {
        **{f"rollout/{name}": value for name, value in staleness_metrics(ages, policy_mask).items()},
        **{f"correction/{name}": value for name, value in lag.items()},
    }


STREAM_COLUMNS = ["batch", "group", "finish", "tokens", "ended"]
"""What `stream_metrics` reads, and `written` of episodes."""


def stream_metrics(before: pa.Table, after: pa.Table, chunks: Sequence[int]) -> dict[str, float]:
    """`chunks`: tokens one after the other that might be written beside the update (`schedule`)."""
    open_: dict[tuple[int, int], bool] = {}
    for batch, group, finish in zip(*(after[name].to_pylist() for name in STREAM_COLUMNS[:3]), strict=True):
        open_[batch, group] = open_.get((batch, group), False) or not finish
    # Completions that ended before the update was taken ended after the chunks.
    first, last = (pc.max(table["ended"]).as_py() or 0 for table in (before, after))
    tokens = [_written_tokens(table) for table in (before, after)]
    return {
        "rollout/prompts_in_flight": float(sum(open_.values())),
        "rollout/prompts_waiting": float(len(open_) - sum(open_.values())),
        "rollout/tokens_ahead": float(tokens[1]),
        "rollout/tokens_beside_update": float(tokens[1] - tokens[0]),
        "rollout/decode_steps_beside_update": float(max(sum(chunks), last - first)),
    }


def _written_tokens(stream: pa.Table) -> int:
    if "written" in stream.column_names:
        return pc.sum(pc.list_flatten(stream["written"])).as_py() or 0
    return pc.sum(pc.list_value_length(stream["tokens"])).as_py() or 0


def mismatch(rollouts: pa.Table, logprobs: pa.Table, rows: torch.Tensor, cap: float) -> dict[str, float]:
    """`rows`: bool [rows], those that were compared."""
    return alignment_metrics(
        padded(logprobs["logprobs"], torch.float32, 0.0),
        padded(rollouts["logprobs"], torch.float32, 0.0),
        padded(rollouts["written"], torch.bool, False) & rows[:, None],
        cap,
    )


def train_metrics(report: dict[str, Any]) -> dict[str, float]:
    corrected = {f"correction/{name}": value for name, value in report["correction"].items()}
    trained = {f"train/{name}": float(report[name]) for name in REPORTED}
    # Reports of earlier versions have no gain.
    for name in ("first_reward_slope", "update_gain"):
        if report.get(name) is not None:
            trained[f"train/{name}"] = report[name]
    return {**trained, **corrected}


def scale_metrics(scales: dict[str, Any]) -> dict[str, float]:
    return {
        f"kv/{part}_{kind}_layer{i}": value
        for part, rows in (("scale", scales["layers"]), ("amax", scales["amax"]))
        for i, layer in enumerate(rows)
        for kind, value in layer.items()
    }
