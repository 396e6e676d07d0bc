"""Traces of a few completions, for MLflow's viewer: the prompt as input, the completion as output, numbers beside them.

Identities come from the run, step, group and sample. A trace that is written again replaces itself.
"""

import base64
import hashlib
import json
from collections.abc import Mapping

from mlflow.entities import TraceInfo, TraceLocation, TraceState
from mlflow.entities.span import Span, SpanType
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from flows.tracking.tables import COMPLETION_COLUMNS
from flows.tracking.tracker import Table, Tracker
from fp8core.errors import printable_lines

_NAME = "completion"
_ASKED, _WROTE = "prompt", "completion"


def log_traces(tracker: Tracker, completions: Table, committed_ms: Mapping[int, int]) -> None:
    """Write or replace a trace of the first completion of each group in a table of completions.

    `committed_ms` has the time of each step. Raises MLflow's errors.
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
        info, span = _trace(tracker, hashlib.sha256(key.encode()).hexdigest(), cells, committed_ms[cells["step"]])
        client.start_trace(info)
        try:
            client.log_spans(tracker.experiment_id, [span])
        except NotImplementedError:
            return  # A server older than MLflow 3.4 takes no spans.


def _trace(tracker: Tracker, digest: str, cells: Mapping[str, object], milliseconds: int) -> tuple[TraceInfo, Span]:
    prompt, completion = (printable_lines(str(cells[name])) for name in (_ASKED, _WROTE))
    identity = f"tr-{digest[:32]}"
    info = TraceInfo(
        trace_id=identity,
        trace_location=TraceLocation.from_experiment_id(tracker.experiment_id),
        request_time=milliseconds,
        state=TraceState.OK,
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
    written = {
        "trace_id": base64.b64encode(bytes.fromhex(digest[:32])).decode(),
        "span_id": base64.b64encode(bytes.fromhex(digest[:16])).decode(),
        "parent_span_id": None,
        "name": _NAME,
        "start_time_unix_nano": milliseconds * 1_000_000,
        "end_time_unix_nano": milliseconds * 1_000_000,
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "events": [],
        "attributes": {name: json.dumps(value) for name, value in attributes.items()},
    }
    return info, Span.from_dict(written)
