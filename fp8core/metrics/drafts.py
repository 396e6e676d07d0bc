"""Metrics of drafts, for trackers and the report alone: two equal trainings need not share them."""

from collections.abc import Mapping

from fp8core.metric import Curve, Metric
from fp8core.rollout.drafts import ACCEPTED_TOKENS, DRAFT_TOKENS, FORWARDS, SAVED_FORWARDS, SOURCES

_TOKENS = Metric("rollout/draft_tokens", "tokens of [drafts](../guides/speculation.md)")
_ACCEPTED = Metric("rollout/accepted_tokens", "tokens of drafts that the policy wrote as well")
_ACCEPTANCE = Metric(
    "rollout/draft_acceptance",
    "share of drafts' tokens that the policy wrote",
    unit="share of drafts' tokens",
    curve=Curve("signals", "Accepted drafts", include=(0.0, 1.0)),
)
_BY_SOURCE = Metric(
    "rollout/draft_acceptance_*",
    "of drafts from the `prompt`, its `group` or `earlier` completions",
    unit="share of drafts' tokens",
    curve=Curve("signals", "Accepted drafts by source", include=(0.0, 1.0), parts=True),
)
_FORWARDS = Metric("rollout/forwards", "forwards in which completions were written")
_SAVED = Metric("rollout/saved_forwards", "further forwards without drafts")
METRICS = (_TOKENS, _ACCEPTED, _ACCEPTANCE, _BY_SOURCE, _FORWARDS, _SAVED)


def draft_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Of counts by the names in `rollout.drafts`; empty where there are none."""
    if not counts:
        return {}
    tokens, accepted = (
        [counts.get(name + source, 0) for source in SOURCES] for name in (DRAFT_TOKENS, ACCEPTED_TOKENS)
    )
    shares = {
        _BY_SOURCE.name.replace("*", source): part / whole
        for source, part, whole in zip(SOURCES, accepted, tokens, strict=True)
        if whole
    }
    if total := sum(tokens):
        shares[_ACCEPTANCE.name] = sum(accepted) / total
    return {
        _TOKENS.name: float(total),
        _ACCEPTED.name: float(sum(accepted)),
        **shares,
        _FORWARDS.name: float(counts.get(FORWARDS, 0)),
        _SAVED.name: float(counts.get(SAVED_FORWARDS, 0)),
    }
