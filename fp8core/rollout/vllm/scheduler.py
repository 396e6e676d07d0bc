"""vLLM's scheduler, with drafts as long as they pay."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from fp8core.rollout.drafts import Acceptance

_FORWARD_ROWS = 256
"""Rows that cost as much as a step without any, an estimate: with few, a step takes as long as reading the weights."""
# Of the steps in which no draft pays, one in so many has a token of it.
_TRIES = 32


class DraftLengths:
    """Tokens of a draft by running requests, for one step each time.

    A step has at most the rows of a full batch. Within that, a draft has the length of the most expected tokens over
    the cost. `note` gives the share of drafts' tokens that came true, each after those before it.
    """

    def __init__(self, largest: int, longest: int) -> None:
        """`largest`: requests of a full batch. `longest`: tokens of a draft."""
        self._largest = largest
        self._longest = longest
        self._acceptance = Acceptance()
        self._steps = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Count one draft."""
        for place in range(min(accepted + 1, drafted)):
            self._acceptance.note(0, place < accepted)

    def __getitem__(self, requests: int) -> int:
        longest = min(self._longest, self._largest // max(1, requests) - 1)
        (share, *_), expected, chance = self._acceptance.shares, 1.0, 1.0
        best, most = 0, expected / (_FORWARD_ROWS + requests)
        for length in range(1, longest + 1):
            chance *= share
            expected += chance
            if (gain := expected / (_FORWARD_ROWS + requests * (1 + length))) > most:
                best, most = length, gain
        self._steps += 1
        return best or int(longest > 0 and self._steps % _TRIES == 0)


class DraftScheduler(AsyncScheduler):
    """Lengths take the place of vLLM's table for its own proposers (`dynamic_sd_lookup`)."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._begin()

    def add_request(self, request: Any) -> None:
        if not self.requests:
            # A rollout begins, of another policy, and with more that was written before.
            self._begin()
        super().add_request(request)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any
    ) -> Any:
        """vLLM calls it for each draft."""
        self.dynamic_sd_lookup.note(num_draft_tokens, num_accepted_tokens)
        counts = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens}
        return super().make_spec_decoding_stats(spec_decoding_stats, **counts, **more)

    def _begin(self) -> None:
        self.dynamic_sd_lookup = DraftLengths(self.max_num_running_reqs, self.num_spec_tokens)
