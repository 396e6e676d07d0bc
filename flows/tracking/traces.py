"""Traces of a few completions, for MLflow's viewer: the prompt as input, the completion as output, numbers beside them.

Identities come from the run, step, group and sample, so that a trace which is written again replaces itself. MLflow's
`start_span` chooses random ones, and logs errors instead of raising them. Hence its client for traces here, with spans
of OpenTelemetry.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise

from mlflow.entities import Span, SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode

from flows.tracking.tracker import Completions, Row
from fp8core.errors import printable_lines
from fp8core.run.verdicts import JUDGE, ended_as


def log_traces(uri: str, experiment_id: str, run_id: str, completions: Completions) -> None:
    """Write or replace a trace of the first completion of each group; turns of an episode are spans of their own.

    Raises MLflow's errors.
    """
    client, seen = TracingClient(uri), set[tuple[int, int]]()
    for values in completions.table.rows:
        row = dict(zip(completions.table.columns, values, strict=True))
        if (row["step"], row["group"]) in seen:
            continue
        seen.add((row["step"], row["group"]))
        digest = hashlib.sha256(f"{run_id}/{row['step']}/{row['group']}/{row['sample']}".encode()).hexdigest()
        prompt, completion = (printable_lines(str(row[name])) for name in ("prompt", "completion"))
        committed_ms, status = completions.committed_ms[row["step"]], _status(row)
        client.start_trace(
            TraceInfo(
                trace_id=_trace_id(digest),
                trace_location=TraceLocation.from_experiment_id(experiment_id),
                request_time=committed_ms,
                state=TraceState.ERROR if status.status_code is StatusCode.ERROR else TraceState.OK,
                request_preview=prompt,
                response_preview=completion,
                execution_duration=0,
                trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
                tags={TraceTagKey.TRACE_NAME: f"step {row['step']}"},
            )
        )
        numbers = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        spans = [_span(digest, None, "completion", prompt, completion, numbers, committed_ms, status)]
        client.log_spans(experiment_id, [*spans, *_turns(digest, row, completions)])


def _turns(digest: str, row: Row, completions: Completions) -> Iterator[Span]:
    """A span for each turn of the policy: what the environment had said as input, what the policy wrote as output."""
    turns = completions.turns.get((row["step"], row["group"], row["sample"]), [])
    for before, turn in pairwise(turns):
        numbers = {name: turn[name] for name in ("failed", "reward", "mismatch", "differing", "outcome", "detail")}
        numbers["calls"] = json.loads(turn["calls"] or "[]")
        if turn["malformed"]:
            numbers["malformed"] = turn["malformed"]
        # The outcome of a last turn that the verifier judged is that of the whole episode.
        status = _status(row if turn["outcome"] == JUDGE else turn)
        said, text = printable_lines(before["said"]), printable_lines(turn["text"])
        committed_ms = completions.committed_ms[row["step"]]
        yield _span(digest, turn["turn"], f"turn {turn['turn']}", said, text, numbers, committed_ms, status)


def _status(judged: Mapping[str, object]) -> Status:
    """A failure is what was judged and not right.

    A turn before the last has the outcome "", a completion whose rewards gc removed None.
    """
    outcome = judged["outcome"]
    if outcome in ("right", "", None):
        return Status(StatusCode.UNSET if outcome is None else StatusCode.OK)
    return Status(StatusCode.ERROR, ended_as(str(outcome), str(judged["detail"] or "")))


def _trace_id(digest: str) -> str:
    return f"tr-{digest[:32]}"


def _span(
    digest: str,
    turn: int | None,
    name: str,
    inputs: str,
    outputs: str,
    numbers: Mapping[str, object],
    milliseconds: int,
    status: Status,
) -> Span:
    """A span of the trace of a digest: of the whole completion, or of a turn below it."""
    trace, whole = int(digest[:32], 16), int(digest[:16], 16)
    own = whole if turn is None else int(hashlib.sha256(f"{digest}/{turn}".encode()).hexdigest()[:16], 16)
    when = milliseconds * 1_000_000 + (turn or 0)  # A viewer orders spans by their time.
    attributes = {
        SpanAttributeKey.REQUEST_ID: _trace_id(digest),
        SpanAttributeKey.SPAN_TYPE: SpanType.LLM,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
        **numbers,
    }
    return Span(
        ReadableSpan(
            name,
            context=SpanContext(trace, own, is_remote=False),
            parent=None if turn is None else SpanContext(trace, whole, is_remote=False),
            attributes={key: json.dumps(value) for key, value in attributes.items()},
            start_time=when,
            end_time=when,
            status=status,
        )
    )
