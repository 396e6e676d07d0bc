"""docs/reference/metrics.md explains the metrics that a run records: all of them, and no others."""

import re
from itertools import product
from pathlib import Path

import pyarrow as pa
import torch

from fp8core.alignment.bounds import BOUNDED
from fp8core.rl.correction import CorrectionRule, row_error_metrics
from fp8core.rl.losses import ClipRange
from fp8core.rl.staleness import lag_metrics, staleness_metrics
from fp8core.run.commit import stored_metrics
from fp8core.run.step_metrics import stream_metrics, turn_metrics
from fp8core.run.turns import episode_means
from fp8core.store.tables import STREAM, TURNS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
NAME = re.compile(r"`((?:reward|environment|rollout|train|correction|kv|alignment|sync)/[\w.{},]+)`")


def spelled_out(pattern: str) -> list[str]:
    """`a_{b,c}` as `a_b` and `a_c`."""
    parts = re.split(r"\{([\w.,]+)\}", pattern)
    choices = (part.split(",") if i % 2 else [part] for i, part in enumerate(parts))
    return ["".join(choice) for choice in product(*choices)]


def recorded(run) -> set[str]:
    """Names of all steps' metrics, with N for the number of a layer."""
    names = {name for step in run.ledger.steps() for name in stored_metrics(run.ledger, run.store, step)}
    return {re.sub(r"_layer\d+$", "_layerN", name) for name in names}


def recorded_ahead() -> set[str]:
    """Names of what only a run that generates ahead has, with A for an age."""
    logprobs, ages, mask = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    lag = lag_metrics(logprobs, logprobs, ages, mask, CorrectionRule(), ClipRange(low=0.2, high=0.2))
    names = {f"correction/{name}" for name in lag} | {f"rollout/{name}" for name in staleness_metrics(ages, mask)}
    names |= stream_metrics(STREAM.empty_table(), STREAM.empty_table(), [], []).keys() | {
        "rollout/unverifiable",
        "rollout/ids_without_token",
    }
    return {name.replace("_age_0", "_age_A") for name in names}


def recorded_of_episodes() -> set[str]:
    """Names of what only a run with an environment has, with N for the number of a turn."""
    row = dict.fromkeys(TURNS.names, 0) | dict.fromkeys(("text", "calls", "malformed", "said"), "")
    row |= {
        "turn": 1,
        "end": 1,
        "observation_end": 1,
        "outcome": "",
        "detail": "",
        "observation": "",
        "info": '{"NAME": 1}',
    }
    turns = pa.Table.from_pylist([row], TURNS)
    both = pa.table({"finish": ["stop"], "logprobs": [[0.0]]})
    names = turn_metrics(turns, both, both, {(0, 0): 0}).keys()
    means = episode_means([[row]])
    return {re.sub(r"_turn_1$", "_turn_N", name) for name in names} | {f"environment/heldout_{name}" for name in means}


def test_every_metric_of_a_run_is_explained_and_every_name_exists(whole_run):
    empty, nothing = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    # `correction.seq_logprob_error_threshold` has metrics that a run records where it is set.
    masking = {f"correction/{name}" for name in row_error_metrics(empty, nothing, nothing, empty)}
    # With `reward.length` and its like.
    names = recorded(whole_run) | recorded_ahead() | recorded_of_episodes() | masking
    names |= {"reward/verdict", "reward/NAME"}
    explained = {name for pattern in NAME.findall(PAGE) for name in spelled_out(pattern)}
    assert explained <= names
    # The table of numerics.md has the others.
    assert all(name.startswith("alignment/") for name in names - explained)


def test_the_bounds_are_on_the_metrics_that_it_says():
    rows = re.findall(r"^\| `([\w/]+)` \| `alignment\.stop\.(\w+)`, at \w+ \|", PAGE, re.MULTILINE)
    assert {bound: metric for metric, bound in rows} == BOUNDED
