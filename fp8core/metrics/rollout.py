"""Metrics of completions, of prompts that a step draws by use, and of generation ahead of the update."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from fp8core.config.run import RunConfig
from fp8core.metric import Column, Curve, Metric
from fp8core.rl.batch import pad_column

LENGTH = Metric(
    "rollout/length_mean",
    "tokens of a completion in the mean",
    unit="tokens, mean of the step",
    headline="length",
    form="tenths",
    curve=Curve("learning", "Completion length", include=(0.0,)),
    column=Column("length", 6),
)
LENGTH_MAX = Metric("rollout/length_max", "tokens of the longest completion")
TOKENS = Metric("rollout/tokens", "tokens of all completions", form="whole", numbers={"tokens generated": "sum"})
CUT_OFF = Metric(
    "rollout/cut_off_share",
    "completions that reached `rollout.max_new_tokens`. *Rises: raise the limit, or use `tasks.shape:shape`, which "
    "subtracts reward for length.*",
    unit="share that reached max_new_tokens",
    curve=Curve("signals", "Cut-off completions", include=(0.0, 1.0)),
)
ENTROPY = Metric(
    "rollout/entropy",
    "of the training policy on those tokens, nats. *Falls to 0: raise `loss.entropy`, `loss.clip_high` or the "
    "temperature, or lower the learning rate.*",
    unit="nats per token",
    headline="entropy",
    curve=Curve("learning", "Entropy of the policy", include=(0.0,)),
)
UNVERIFIABLE = Metric("rollout/unverifiable", "1 where [no pass gives its bits](../guides/asynchronous.md)")
METRICS = (LENGTH, LENGTH_MAX, TOKENS, CUT_OFF, ENTROPY)

IN_FLIGHT = Metric(
    "rollout/prompts_in_flight", "begun prompts after the update. *None: raise `pipeline.max_staleness`.*"
)
WAITING = Metric("rollout/prompts_waiting", "complete prompts after the update")
AHEAD = Metric("rollout/tokens_ahead", "tokens that later steps learn from")
BESIDE = Metric(
    "rollout/tokens_beside_update",
    "tokens that this update hid. *Few: raise `pipeline.ahead_tokens`.*",
    unit="tokens of the step's own",
    curve=Curve(
        "ahead",
        "Generation beside the update",
        over=TOKENS.name,
        include=(0.0, 1.0),
        note="Tokens that were written beside the update, over those that it learned from. 1: nothing waits.",
    ),
)
IN_A_ROW = Metric("rollout/decode_steps_beside_update", "tokens in a row that the update hid, at most")
STREAM_METRICS = (IN_FLIGHT, WAITING, AHEAD, BESIDE, IN_A_ROW, UNVERIFIABLE)
STREAM_COLUMNS = ["batch", "group", "finish", "tokens", "ended", "written"]
"""What `stream_metrics` reads, and `written` of episodes."""


def rollout_metrics(rollouts: pa.Table, logprobs: pa.Table) -> dict[str, float]:
    policy_mask = pad_column(rollouts["written"], torch.bool, False)
    lengths = policy_mask.sum(dim=1).double()
    entropy = pad_column(logprobs["entropy"], torch.float64, 0.0)
    return {
        LENGTH.name: float(lengths.mean()),
        LENGTH_MAX.name: float(lengths.max()),
        TOKENS.name: float(lengths.sum()),
        CUT_OFF.name: rollouts["finish"].to_pylist().count("length") / rollouts.num_rows,
        ENTROPY.name: float(entropy[policy_mask].mean()),
    }


def stream_metrics(before: pa.Table, after: pa.Table, chunks: Sequence[int]) -> dict[str, float]:
    """`chunks`: tokens one after the other that might be written beside the update (`schedule`)."""
    open_: dict[tuple[int, int], bool] = {}
    for batch, group, finish in zip(*(after[name].to_pylist() for name in STREAM_COLUMNS[:3]), strict=True):
        open_[batch, group] = open_.get((batch, group), False) or not finish
    # Completions that ended before the update was taken ended after the chunks.
    first, last = (pc.max(table["ended"]).as_py() or 0 for table in (before, after))
    tokens = [_written_tokens(table) for table in (before, after)]
    return {
        IN_FLIGHT.name: float(sum(open_.values())),
        WAITING.name: float(len(open_) - sum(open_.values())),
        AHEAD.name: float(tokens[1]),
        BESIDE.name: float(tokens[1] - tokens[0]),
        IN_A_ROW.name: float(max(sum(chunks), last - first)),
    }


def _written_tokens(stream: pa.Table) -> int:
    if "written" in stream.column_names:
        return pc.sum(pc.list_flatten(stream["written"])).as_py() or 0
    return pc.sum(pc.list_value_length(stream["tokens"])).as_py() or 0


BATCHES = Metric(
    "rollout/batches", "batches that a step generated. *At `rollout.refill.max_batches`: raise it, or change the data.*"
)
GROUPS = Metric("rollout/groups_with_signal", "groups with a signal that the step learns from")
DRAWN_REWARD = Metric("reward/drawn_mean", "mean reward of all that was generated", unit="mean reward of the step")
WASTED = Metric(
    "rollout/wasted_share",
    "share of generated tokens in groups that the step does not learn from. *Rises: set `rollout.retire_after`, or "
    "choose other data.*",
    unit="share of generated tokens",
    curve=Curve("signals", "Wasted tokens", include=(0.0, 1.0)),
    numbers={"share of wasted tokens, mean": "mean"},
)
RETIRED = Metric("rollout/retired_prompts", "prompts that `rollout.retire_after` draws less often")
DRAW_METRICS = (BATCHES, GROUPS, DRAWN_REWARD, WASTED, RETIRED)


def draw_metrics(visits: pa.Table, draws: Mapping[str, Any], config: RunConfig) -> dict[str, float]:
    """`draws`: after the step."""
    metrics = dict[str, float]()
    if config.rollout.refill is not None:
        rows = visits.to_pylist()
        learnt_rows = [row for row in rows if row["signal"] and not row["dropped"]]
        learnt_tokens, tokens = (sum(row["tokens"] for row in each) for each in (learnt_rows, rows))
        metrics |= {
            BATCHES.name: len(rows) / config.rollout.drawn_prompts,
            GROUPS.name: float(len(learnt_rows)),
            DRAWN_REWARD.name: sum(row["reward"] for row in rows) / len(rows),
            WASTED.name: 1 - learnt_tokens / max(1, tokens),
        }
    if (retire_after := config.rollout.retire_after) is not None:
        metrics[RETIRED.name] = float(sum(streak >= retire_after for streak in draws["streaks"].values()))
    return metrics
