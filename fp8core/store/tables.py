"""Columns of the tables that steps exchange; one row is one prompt or one completion.

`group` is the prompt's index within the step, `sample` the completion's index within its group. Tables of
completions are sorted by both, so that their rows correspond. `written` says which tokens of a completion the policy
wrote: those of tools and users in between are context, and stay out of loss, rewards, statistics and metrics.
"""

import pyarrow as pa

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())

PROMPTS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("text", pa.string()),
        ("tokens", _TOKENS),
        ("reference", pa.string()),
    ]
)

ROLLOUTS = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("prompt_id", pa.string()),
        ("seed", pa.int64()),
        ("prompt_tokens", _TOKENS),
        ("tokens", _TOKENS),
        ("logprobs", _LOGPROBS),
        ("written", pa.list_(pa.bool_())),
        ("finish", pa.string()),
        ("text", pa.string()),
    ]
)

# With `rollout.router_replay`: the experts of every position, sparse layer by sparse layer (`Completion.experts`).
ROUTED_ROLLOUTS = ROLLOUTS.append(pa.field("experts", pa.list_(pa.list_(pa.list_(pa.int16())))))

REWARDS = pa.schema(
    [
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("reward", pa.float64()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
        ("keep", pa.bool_()),
    ]
)

LOGPROBS = pa.schema([("group", pa.int32()), ("sample", pa.int32()), ("logprobs", _LOGPROBS), ("entropy", _LOGPROBS)])

ORDER = [("group", "ascending"), ("sample", "ascending")]
