"""Rollouts as padded tensors for the trainer.

Padding is on the right. Only completion tokens carry log-probs; `mask` is the one statement of which tokens the
policy wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their completions.

    Attributes:
        tokens: int64 [B, T].
        valid: bool [B, T], False on padding.
        completion: bool [B, T], True on tokens the policy wrote; never in column 0.
        experts: int16 [B, T, sparse layers, k], the experts to replay at each position, -1 where the router is to
            choose; None without router replay.
    """

    tokens: Tensor
    valid: Tensor
    completion: Tensor
    experts: Tensor | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        experts: Sequence[Tensor] | None = None,
    ) -> "TokenBatch":
        """From token ids per row; every prompt and completion holds at least one.

        Args:
            prompts: token ids.
            completions: token ids.
            experts: int16 [positions, sparse layers, k] of each row, as in `rollout.engine.Completion`.
        """
        rows = [list(prompt) + list(completion) for prompt, completion in zip(prompts, completions, strict=True)]
        tokens = pad(rows, torch.int64, 0)
        columns = torch.arange(tokens.shape[1])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        assert int(starts.min()) > 0, "an empty prompt"
        valid = columns < lengths
        recorded = None if experts is None else _pad_experts(experts, tokens.shape[1])
        return cls(tokens, valid, valid & (columns >= starts), recorded)

    @property
    def positions(self) -> Tensor:
        """int64 [B, T], from 0 in every row; 0 on padding."""
        return torch.where(self.valid, torch.arange(self.tokens.shape[1]), 0)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def slices(self, size: int) -> Iterator[tuple[slice, "TokenBatch"]]:
        """Micro-batches of at most `size` rows, trimmed to their longest row."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            length = int(self.valid[rows].sum(-1).max())
            yield rows, self.part(rows, length)

    def part(self, rows: slice, length: int | None = None) -> "TokenBatch":
        """These rows, and of them the first `length` columns."""
        tokens, valid, completion = (x[rows, :length] for x in (self.tokens, self.valid, self.completion))
        return TokenBatch(tokens, valid, completion, None if self.experts is None else self.experts[rows, :length])


@dataclass(frozen=True)
class RolloutBatch:
    """What one update learns from. Per-token tensors are [B, C], C the longest completion.

    Attributes:
        sequences: the tokens.
        mask: bool [B, C], True where a completion has a token.
        rollout_logprobs: FP32, under the policy that sampled.
        old_logprobs: FP32, under the trainer's policy at the start of the step.
        reference_logprobs: FP32 under the frozen reference policy, or None.
        advantages: FP32 [B].
        keep: bool [B], False for rows that are left out of the loss.
        weights: [B, C], importance weights; None until `Objective.corrected` has set them.
    """

    sequences: TokenBatch
    mask: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    advantages: Tensor
    keep: Tensor
    weights: Tensor | None = None

    def rows(self, rows: slice) -> "RolloutBatch":
        """These rows only; padding is left as it is."""
        reference = None if self.reference_logprobs is None else self.reference_logprobs[rows]
        return RolloutBatch(
            sequences=self.sequences.part(rows),
            mask=self.mask[rows],
            rollout_logprobs=self.rollout_logprobs[rows],
            old_logprobs=self.old_logprobs[rows],
            reference_logprobs=reference,
            advantages=self.advantages[rows],
            keep=self.keep[rows],
            weights=None if self.weights is None else self.weights[rows],
        )


def _pad_experts(rows: Sequence[Tensor], length: int) -> Tensor:
    out = torch.full((len(rows), length, *rows[0].shape[1:]), -1, dtype=torch.int16)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def pad(rows: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype, value: float) -> Tensor:
    """Right-pad ragged rows to [B, longest]."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    out = torch.full((len(rows), max((len(row) for row in rows), default=0)), value, dtype=dtype)
    # In one piece: a tensor for each of hundreds of rows takes longer than the update of a small model.
    out[torch.arange(out.shape[1]) < lengths] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return out


def length_mask(rows: Sequence[Sequence[int] | Sequence[float]]) -> Tensor:
    """bool [B, longest], True where a row has an element."""
    return torch.arange(max(len(row) for row in rows)) < torch.tensor([len(row) for row in rows])[:, None]
