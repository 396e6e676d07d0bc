"""Metrics of time, for trackers alone: two equal trainings need not share them."""

from fp8core.metric import Metric

SECONDS = Metric("time/seconds", "of the step, from its first task to its commit", headline="seconds")
OVERHEAD = Metric("time/overhead_ms", "milliseconds outside tasks", better="lower", headline="overhead_ms")
TOKENS_PER_SECOND = Metric(
    "time/tokens_per_second", "tokens of a step by its seconds", better="higher", headline="5_tokens_per_second"
)
METRICS = (
    *(SECONDS, OVERHEAD, TOKENS_PER_SECOND),
    Metric("time/*_seconds", "of a task"),
    Metric("time/*_share", "share of a task in the time of all tasks"),
    Metric("time/environment_*", "`p50`, `p95` and `max` of an environment's answers, in seconds"),
)
