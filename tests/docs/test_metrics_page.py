"""docs/metrics.md explains the metrics that a run records: all of them, and no others."""

import re
from itertools import product
from pathlib import Path

import pytest

from fp8core.alignment.bounds import crossed
from fp8core.config.run import StopConfig
from fp8core.errors import UserError
from tasks.commit import stored_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAME = re.compile(r"`((?:reward|rollout|train|correction|kv|alignment)/[\w.{},]+)`")


def spelled_out(pattern: str) -> list[str]:
    """`a_{b,c}` as `a_b` and `a_c`."""
    parts = re.split(r"\{([\w.,]+)\}", pattern)
    choices = (part.split(",") if i % 2 else [part] for i, part in enumerate(parts))
    return ["".join(choice) for choice in product(*choices)]


def recorded(run) -> set[str]:
    """Names of all steps' metrics, with N for the number of a layer."""
    names = {name for step in run.ledger.steps() for name in stored_metrics(run.ledger, run.store, step)}
    return {re.sub(r"_layer\d+$", "_layerN", name) for name in names}


def test_every_metric_of_a_run_is_explained_and_every_name_exists(whole_run):
    names = recorded(whole_run)
    explained = {name for pattern in NAME.findall(PAGE) for name in spelled_out(pattern)}
    assert explained <= names
    # The table of numerics.md has the others.
    assert all(name.startswith("alignment/") for name in names - explained)


def test_the_bounds_are_on_the_metrics_that_it_says():
    rows = dict(re.findall(r"^\| `(alignment/\w+)` \| `alignment\.stop\.(\w+)`, at \w+ \|", PAGE, re.MULTILINE))
    assert set(rows.values()) == set(StopConfig.model_fields) - {"patience", "action"}
    for metric, bound in rows.items():
        with pytest.raises(UserError, match=f"measures {metric};"):
            crossed(StopConfig(**{bound: 1.0, "patience": 1}), [{}])
