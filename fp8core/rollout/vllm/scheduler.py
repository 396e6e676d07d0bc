"""vLLM's scheduler, with drafts as long as a step then has no more rows than that of a full batch."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class DraftScheduler(AsyncScheduler):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Of vLLM's dynamic speculation, which it has for proposers of its own: tokens of a draft by running requests.
        self.dynamic_sd_lookup = draft_lengths(self.max_num_running_reqs, self.num_spec_tokens)


def draft_lengths(largest: int, longest: int) -> list[int]:
    """For 0, 1, ... `largest` requests."""
    return [min(longest, largest // max(1, requests) - 1) for requests in range(largest + 1)]
