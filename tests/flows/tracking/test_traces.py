"""Episodes in MLflow: a trace each, with a span for every turn of the policy."""

import io
import json
import math
from pathlib import Path
from typing import Any

from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.tables import COMPLETION_COLUMNS, completion_groups
from flows.tracking.tracker import Completions, Table
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.checks.settings import graph_of
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.verdicts import JUDGE

DIGITS = Path(__file__).parents[2] / "parts" / "digits_environment.py"
SPOKEN = {
    "environment": {"name": f"{DIGITS}:Digits", "max_turns": 12, "turn_tokens": 3, "advantage": "turn"},
    "rollout.max_new_tokens": 40,
}


def test_an_episode_is_a_trace_with_a_span_for_each_turn(
    small: dict[str, Any], tracker: MlflowTracker, tmp_path: Path
) -> None:
    config = load_config("tiny", {**small, **SPOKEN, "steps": 1, "runs": str(tmp_path)})
    console = Console(io.StringIO(), 1)
    with open_directory(config, "spoken") as directory, open_run(config, graph_of(config), directory, console) as run:
        train(run)
        completions = completion_groups(run)
        artifacts = directory.ledger.artifacts(1)
        stored = directory.store.get_table(artifacts["turns"]).to_pylist()
    assert completions is not None
    # Means over the turns of an episode, which the update weighed one by one.
    advantages = [row[COMPLETION_COLUMNS.index("advantage")] for row in completions.table.rows]
    assert all(math.isfinite(each) for each in advantages)
    assert any(advantages)
    # The second time they replace themselves.
    for _ in range(2):
        tracker.log_completions("completions.json", completions)
    traces = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert len(traces) == len({row[COMPLETION_COLUMNS.index("group")] for row in completions.table.rows})
    for trace in traces:
        whole, *turns = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
        place = whole.attributes["group"], whole.attributes["sample"]
        rows = [row for row in stored if (row["group"], row["sample"]) == place]
        asked, *written = rows
        assert [span.parent_id for span in turns] == [whole.span_id] * len(written)
        assert [span.name for span in turns] == [f"turn {row['turn']}" for row in written]
        assert [span.outputs for span in turns] == [row["text"] for row in written]
        assert [span.inputs for span in turns] == [_said(row) for row in [asked, *written[:-1]]]
        assert {(span.attributes["mismatch"], span.attributes["differing"]) for span in turns} == {(0, 0)}
        assert turns[-1].attributes["outcome"] == rows[-1]["outcome"]
    assert max(len(trace.data.spans) for trace in traces) > 2, "no episode of several turns"


def test_only_the_trace_of_a_right_answer_is_green(tracker: MlflowTracker) -> None:
    """A turn before the last is judged by nothing; the last one of an episode that the verifier judges, by that."""
    judged: dict[str | None, tuple[str, str]] = {
        **{"right": ("OK", ""), "wrong": ("ERROR", "wrong: 7, not 5"), "unparsed": ("ERROR", "unparsed: 7, not 5")},
        **{"timeout": ("ERROR", "timeout: 7, not 5"), "crashed": ("ERROR", "crashed: 7, not 5")},
        None: ("UNSET", ""),
    }
    rows = [
        ("2+3=", "7", 0.0, None, None, 1, group, 0, outcome, "" if outcome in ("right", None) else "7, not 5")
        for group, outcome in enumerate(judged)
    ]
    told = {"begin": 0, "end": 0, "said": "", "text": "", "calls": "", "malformed": "", "failed": 0, "reward": 0.0}
    turn = {**told, "mismatch": None, "differing": None, "detail": ""}
    turns = [{**turn, "turn": number, "outcome": outcome} for number, outcome in enumerate(["", "", JUDGE])]
    spoken = {(1, group, 0): turns for group in range(len(judged))}
    completions = Completions(Table(COMPLETION_COLUMNS, rows), spoken, {1: 1_700_000_000_000})
    tracker.log_completions("completions.json", completions)
    traces = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert len(traces) == len(judged)
    for trace in traces:
        whole, first, last = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
        code, message = judged[whole.attributes["outcome"]]
        assert trace.info.state == ("ERROR" if code == "ERROR" else "OK")
        for span, (wanted, text) in ((whole, (code, message)), (first, ("OK", "")), (last, (code, message))):
            assert (span.status.status_code, span.status.description) == (wanted, text)


def _said(row: dict[str, Any]) -> str:
    said = json.loads(row["said"] or "[]")
    return "\n".join(message["content"] for message in (said["messages"] if isinstance(said, dict) else said))
