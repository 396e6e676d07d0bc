"""Traces of a few completions, for MLflow's viewer: the prompt as input, the completion as output, numbers beside them.

Identities come from the run, step, group and sample. A trace that is written again replaces itself.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from mlflow.entities import TraceInfo, TraceLocation, TraceState
from mlflow.entities.span import Span, SpanType
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from flows.tracking.tables import COMPLETION_COLUMNS
from flows.tracking.tracker import Table, Tracker
from fp8core.errors import printable_lines
from fp8core.report.completions import Row
from fp8core.run.verdicts import JUDGE, ended_as

_NAME = "completion"
_ASKED, _WROTE = "prompt", "completion"
_FAILED = "STATUS_CODE_ERROR"


def log_traces(
    tracker: Tracker,
    completions: Table,
    committed_ms: Mapping[int, int],
    turns: Mapping[tuple[int, int, int], Sequence[Row]] = MappingProxyType({}),
) -> None:
    """Write or replace a trace of the first completion of each group in a table of completions.

    `completions` is `tables.completion_table`; `turns` of episodes (`tables.episode_turns`) are spans of their own.
    Raises MLflow's errors.
    """
    client = TracingClient(tracker.uri)
    seen = set[tuple[int, int]]()
    for row in completions[1]:
        cells = dict(zip(COMPLETION_COLUMNS, row, strict=True))
        place = cells["step"], cells["group"]
        if place in seen:
            continue
        seen.add(place)
        key = f"{tracker.run_id}/{cells['step']}/{cells['group']}/{cells['sample']}"
        digest, when = hashlib.sha256(key.encode()).hexdigest(), committed_ms[cells["step"]]
        info, span = _trace(tracker, digest, cells, when)
        spoken = turns.get((cells["step"], cells["group"], cells["sample"]), [])
        client.start_trace(info)
        try:
            client.log_spans(tracker.experiment_id, [span, *_turn_spans(digest, spoken, when, cells)])
        except NotImplementedError:
            return  # A server older than MLflow 3.4 takes no spans.


def _trace(tracker: Tracker, digest: str, cells: Mapping[str, object], milliseconds: int) -> tuple[TraceInfo, Span]:
    prompt, completion = (printable_lines(str(cells[name])) for name in (_ASKED, _WROTE))
    identity = f"tr-{digest[:32]}"
    info = TraceInfo(
        trace_id=identity,
        trace_location=TraceLocation.from_experiment_id(tracker.experiment_id),
        request_time=milliseconds,
        state=TraceState.ERROR if _status(cells)["code"] == _FAILED else TraceState.OK,
        request_preview=prompt,
        response_preview=completion,
        execution_duration=0,
        trace_metadata={TraceMetadataKey.SOURCE_RUN: tracker.run_id},
        tags={TraceTagKey.TRACE_NAME: f"step {cells['step']}"},
    )
    attributes = {
        SpanAttributeKey.REQUEST_ID: identity,
        SpanAttributeKey.SPAN_TYPE: SpanType.LLM,
        SpanAttributeKey.INPUTS: prompt,
        SpanAttributeKey.OUTPUTS: completion,
        **{name: value for name, value in cells.items() if name not in (_ASKED, _WROTE)},
    }
    return info, _span(digest, digest[:16], None, _NAME, attributes, milliseconds, _status(cells))


def _status(judged: Mapping[str, object]) -> dict[str, str]:
    """Of OpenTelemetry. A failure is what was judged and not right, with outcome and detail as the message.

    A turn before the last has the outcome "", a completion whose rewards gc removed None.
    """
    outcome = judged["outcome"]
    if outcome in ("right", "", None):
        return {"code": "STATUS_CODE_UNSET" if outcome is None else "STATUS_CODE_OK", "message": ""}
    return {"code": _FAILED, "message": ended_as(str(outcome), str(judged["detail"] or ""))}


def _turn_spans(digest: str, turns: Sequence[Row], milliseconds: int, cells: Mapping[str, object]) -> Iterator[Span]:
    """A span for each turn of the policy: what the environment had said as input, what the policy wrote as output.

    The outcome of a last turn that the verifier judged is that of the whole episode (`cells`).
    """
    for before, turn in pairwise(turns):
        numbers = {name: turn[name] for name in ("failed", "reward", "mismatch", "differing", "outcome", "detail")}
        attributes = {
            SpanAttributeKey.REQUEST_ID: f"tr-{digest[:32]}",
            SpanAttributeKey.SPAN_TYPE: SpanType.LLM,
            SpanAttributeKey.INPUTS: printable_lines(before["said"]),
            SpanAttributeKey.OUTPUTS: printable_lines(turn["text"]),
            "calls": json.loads(turn["calls"] or "[]"),
            **({"malformed": turn["malformed"]} if turn["malformed"] else {}),
            **numbers,
        }
        own = hashlib.sha256(f"{digest}/{turn['turn']}".encode()).hexdigest()[:16]
        # A viewer orders spans by their time.
        status = _status(cells if turn["outcome"] == JUDGE else turn)
        yield _span(digest, own, digest[:16], f"turn {turn['turn']}", attributes, milliseconds, status, turn["turn"])


def _span(
    digest: str,
    own: str,
    parent: str | None,
    name: str,
    attributes: Mapping[str, object],
    milliseconds: int,
    status: Mapping[str, str],
    place: int = 0,
) -> Span:
    """A span of the trace of a digest; `own` and `parent` are 16 hex digits, `place` its order in the trace."""
    nanoseconds = milliseconds * 1_000_000 + place
    written: dict[str, object] = {
        "trace_id": base64.b64encode(bytes.fromhex(digest[:32])).decode(),
        "span_id": base64.b64encode(bytes.fromhex(own)).decode(),
        "parent_span_id": None if parent is None else base64.b64encode(bytes.fromhex(parent)).decode(),
        "name": name,
        "start_time_unix_nano": nanoseconds,
        "end_time_unix_nano": nanoseconds,
        "status": dict(status),
        "events": [],
        "attributes": {key: json.dumps(value) for key, value in attributes.items()},
    }
    return Span.from_dict(written)
