"""Metrics of the scales of the FP8 cache, and of the policy that the engine answered for after a sync."""

from collections.abc import Mapping
from typing import Any

from fp8core.metric import Curve, Metric

SATURATED = Metric(
    "kv/saturated_share",
    "elements of Q, K and V beyond their scale; 0 is normal with `amax` and its margin",
    unit="share beyond the scale",
    better="lower",
    curve=Curve("scales", "Saturated elements of Q, K and V", log=True),
)
LAG_ERROR = Metric(
    "kv/lag_error",
    "mean |log2| of the scales in force over those of this step; 1 is a factor of two",
    unit="mean |log2(used / fresh)|",
    better="lower",
    curve=Curve("scales", "Lag of the scales", include=(0.0, 1.0)),
)
METRICS = (
    *(
        Metric(
            f"kv/scale_{name[0]}_layer*",
            "the scale of the next step",
            unit="largest of all layers",
            curve=Curve("scales", f"Scale of {name}", log=True),
        )
        for name in ("queries", "keys", "values")
    ),
    *(
        Metric(f"kv/amax_{kind}_layer*", "magnitude that the scales cover: an average of the largest over steps")
        for kind in "qkv"
    ),
    SATURATED,
    LAG_ERROR,
)
PROBE_DIFFERING = Metric(
    "sync/probe_differing", "known tokens with another log-prob in engine than in trainer", better="lower", ideal=0.0
)
PROBE_ERROR = Metric("sync/probe_error", "mean of exp |difference| over these tokens", better="lower", ideal=1.0)
SYNC_METRICS = (Metric("sync/probe_tokens", "known tokens that were scored"), PROBE_DIFFERING, PROBE_ERROR)


def scale_metrics(scales: Mapping[str, Any]) -> dict[str, float]:
    """Of an artifact of kind `scales`."""
    return {
        f"kv/{part}_{kind}_layer{i}": value
        for part, rows in (("scale", scales["layers"]), ("amax", scales["amax"]))
        for i, layer in enumerate(rows)
        for kind, value in layer.items()
    }
