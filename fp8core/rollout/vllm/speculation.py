"""Speculation in the aligned model: vLLM's second runner computes drafts, and its own sampler judges them.

That sampler draws at every row from the request's seed, the row's position and its log-probs, none of which depend on
other rows. So the token drawn after a draft's tokens is the one that is written without drafts, if these tokens are.

vLLM's own speculation accepts other tokens of the same distribution, and its second runner takes no proposer but
models. Two other interfaces of vLLM 0.26 serve here. A model may bring a state that wraps the sampler
(`get_model_state_cls`). And a model that denoises a canvas has drafts without a proposer (`diffusion_config`).
"""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from fp8core.rollout.drafts import FORWARDS
from fp8core.rollout.vllm.draft_memory import DraftMemory, Text
from fp8core.rollout.vllm.settings import OWN_TOKENS


class Judgement(NamedTuple):
    """`tokens`: int64 [requests, width], of which `written` are written. `accepted` of `drafted` were in a draft, and
    `rejected` rows of the request were in vain. All [requests]."""

    tokens: Tensor
    written: Tensor
    rejected: Tensor
    drafted: Tensor
    accepted: Tensor


def judged(drawn: Tensor, read: Tensor, starts: Tensor, is_whole: Tensor, width: int) -> Judgement:
    """Accept drafts as far as they are what was drawn.

    Args:
        drawn: int64 [rows], the token drawn after each row.
        read: [rows], the token of each row; the first of a request is no draft.
        starts: int32 [requests + 1], the first row of each, and their number.
        is_whole: int32 [requests], 0 where a prompt goes on in the next step, of which nothing is written; else 1.
        width: rows of the longest.
    """
    drafted = starts.diff() - 1
    rows = starts[:-1, None].long() + torch.arange(width, device=starts.device)
    rows = rows.clamp(max=len(drawn) - 1)
    tokens = drawn[rows]
    is_draft = torch.arange(width - 1, device=starts.device) < drafted[:, None]
    is_true = is_draft & (tokens[:, :-1] == read[rows[:, 1:]])
    accepted = is_true.int().cumprod(1).sum(1).int() * is_whole
    return Judgement(tokens, accepted + is_whole, (drafted - accepted) * is_whole, drafted, accepted)


class DraftJudge:
    """Stands where vLLM's sampler is: it calls it, and hands out the next drafts."""

    def __init__(self, sampler: Any, longest: int, draft: int) -> None:
        self._sampler = sampler
        self._longest = longest
        self._draft = draft
        self._memory: DraftMemory | None = None
        self._begun: list[Text] = []
        self._forwards = 0

    @property
    def penalties_state(self) -> Any:
        return self._sampler.penalties_state

    def add_request(self, *arguments: Any) -> None:
        self._sampler.add_request(*arguments)

    def apply_staged_writes(self) -> None:
        self._sampler.apply_staged_writes()

    def begin(self, slot: int, data: Any) -> None:
        """Note vLLM's `NewRequestData`; the next `__call__` reads it."""
        parameters = data.sampling_params
        tokens = data.prefill_token_ids
        # A request that lost its blocks comes again with all that it has written.
        own = (parameters.extra_args or {}).get(OWN_TOKENS, 0) + len(tokens) - len(data.prompt_token_ids)
        self._begun.append(Text(slot, tokens, own, parameters.max_tokens + self._draft + 1))

    def begin_session(self) -> None:
        if self._memory is not None:
            self._memory.begin_session()

    def counts(self) -> Counter[str]:
        counts = Counter[str]() if self._memory is None else self._memory.counts()
        return counts + Counter({FORWARDS: self._forwards})

    def __call__(self, logits: Tensor, batch: Any) -> Any:
        """vLLM's sampler output, of an `InputBatch` and log-probs of its rows."""
        output = self._sampler(logits, batch)
        if self._memory is None:
            # In the run that measures memory: what a model's constructor allocates, vLLM's sleep takes away.
            slots = self._sampler.req_states.max_num_reqs
            self._memory = DraftMemory(slots, self._longest, self._draft, logits.device)
        if self._begun:
            self._memory.begin(self._begun)
            self._begun = []
        self._forwards += 1
        rows, starts, slots = batch.logits_indices, batch.cu_num_logits, batch.idx_mapping.long()
        width = 1 if batch.num_draft_tokens == 0 else 1 + int(batch.num_draft_tokens_per_req.max())
        drawn = output.sampled_token_ids.view(-1)
        found = judged(drawn, batch.input_ids[rows], starts, output.num_sampled, width)
        self._memory.judged(slots, found.drafted, found.accepted)
        firsts = batch.positions[rows[starts[:-1].long()]] + 1
        drafts = self._memory.extend(slots, firsts, found.tokens, found.written)
        self._sampler.req_states.draft_tokens[slots] = drafts
        return replace(output, sampled_token_ids=found.tokens, num_sampled=found.written, num_rejected=found.rejected)


class AlignedState(DefaultModelState):
    """The part of vLLM's second runner that a model brings, beside its forward."""

    judge: DraftJudge | None = None

    def custom_sampler(self, sampler: Any) -> tuple[Any, None] | None:
        if not (draft := self.vllm_config.num_speculative_tokens):
            return None
        self.judge = self.model.judge = DraftJudge(sampler, self.max_model_len, draft)
        return self.judge, None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        if self.judge is not None:
            self.judge.begin(req_index, new_req_data)
