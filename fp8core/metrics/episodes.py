"""Metrics of the turns of episodes with an environment."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import torch

from fp8core.metric import Curve, Metric
from fp8core.rewards.scorer import Key
from fp8core.rl.batch import pad_column
from fp8core.store.tables import key_of

_COUNTS = {
    "turns": "turns of the policy",
    "tool_calls": "calls of tools",
    "tool_errors": "failed calls. *Many: show the format in `data.template`, or warm start.*",
    "malformed": "turns with a malformed call",
}
_TURNS_MAX = Metric("environment/turns_max", "turns of the longest episode")
_OBSERVATION_TOKENS = Metric("environment/observation_tokens", "tokens of the environment")
_ENDS = {
    "turns": "episodes that reached `environment.max_turns`. *Rises: raise the limit.*",
    "observation": "episodes that reached `environment.observation_tokens`. *Rises: raise the limit.*",
}
METRICS = (
    *(Metric(f"environment/{name}", text, curve=Curve("own", include=(0.0,))) for name, text in _COUNTS.items()),
    _TURNS_MAX,
    *(Metric(f"environment/heldout_{name}", "the same for held-out prompts") for name in _COUNTS),
    _OBSERVATION_TOKENS,
    *(Metric(f"environment/ended_{name}", text) for name, text in _ENDS.items()),
    Metric("environment/info_*", "mean of a number that the environment reports", curve=Curve("own")),
    Metric("alignment/logprob_abs_diff_max_turn_*", "of one turn (`_turn_4_7` of four)"),
    Metric("alignment/tokens_differing_turn_*", "of one turn (`_turn_4_7` of four)"),
)


def episode_means(episodes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """By the names of `METRICS` without `environment/`. `episodes`: the rows of the turns of each."""
    turns = [row for rows in episodes for row in rows if row["turn"]]
    totals = {
        "turns": len(turns),
        "tool_calls": sum(len(json.loads(row["calls"])) for row in turns if row["calls"]),
        "tool_errors": sum(row["failed"] for row in turns),
        "malformed": sum(bool(row["malformed"]) for row in turns),
    }
    return {name: total / len(episodes) for name, total in totals.items()}


def turn_metrics(turns: pa.Table, rollouts: pa.Table, logprobs: pa.Table, rows: Mapping[Key, int]) -> dict[str, float]:
    """`rows`: key -> row in `rollouts` and `logprobs`, of completions that are compared."""
    table = turns.to_pylist()
    episodes = [list(group) for _, group in groupby(table, key_of)]
    # An episode that never began has a token in place of all that, which the environment did not write.
    observation_tokens = [
        rows_of[-1]["observation_end"] - sum(row["end"] - row["begin"] for row in rows_of)
        for rows_of in episodes
        if rows_of[-1]["turn"]
    ]
    infos: dict[str, list[float]] = {}
    for row in table:
        for name, value in json.loads(row["info"] or "{}").items():
            infos.setdefault(name, []).append(value)
    finishes = Counter(rollouts["finish"].to_pylist())
    return {
        **{f"environment/{name}": value for name, value in episode_means(episodes).items()},
        _TURNS_MAX.name: float(max(rows_of[-1]["turn"] for rows_of in episodes)),
        _OBSERVATION_TOKENS.name: sum(observation_tokens) / len(episodes),
        **{f"environment/ended_{name}": finishes[name] / len(episodes) for name in _ENDS},
        **{f"environment/info_{name}": sum(values) / len(values) for name, values in sorted(infos.items())},
        **mismatch_by_turn(table, rollouts, logprobs, rows),
    }


def mismatch_by_turn(
    turns: Sequence[Mapping[str, Any]], rollouts: pa.Table, logprobs: pa.Table, rows: Mapping[Key, int]
) -> dict[str, float]:
    """By turns 1, 2 to 3, 4 to 7, ... of episodes."""
    sampling_logprobs, training_logprobs = (
        pad_column(table["logprobs"], torch.float32, 0.0) for table in (rollouts, logprobs)
    )
    apart = (sampling_logprobs.double() - training_logprobs.double()).abs()
    differ = sampling_logprobs.view(torch.int32) != training_logprobs.view(torch.int32)
    largest = dict[str, float]()
    differing = Counter[str]()
    for turn in turns:
        row = rows.get(key_of(turn))
        if row is None or turn["begin"] == turn["end"]:
            continue
        tokens = slice(turn["begin"], turn["end"])
        first = 1 << turn["turn"].bit_length() - 1
        name = f"turn_{first}" if first == 1 else f"turn_{first}_{2 * first - 1}"
        largest[name] = max(largest.get(name, 0.0), float(apart[row, tokens].max()))
        differing[name] += int(differ[row, tokens].sum())
    return {
        **{f"alignment/logprob_abs_diff_max_{name}": value for name, value in largest.items()},
        **{f"alignment/tokens_differing_{name}": float(differing[name]) for name in largest},
    }
