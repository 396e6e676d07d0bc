"""Rollouts as tensors for the trainer, padded on the right, and as columns of stored tables.

`response_mask` has all tokens after the prompt, `policy_mask` those that the policy wrote. `row_mask` has the rows that
may be in the loss. Then the correction decides: the loss divides by the tokens of `loss_mask`, and has a term for those
of `accepted_mask`.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fp8core.numerics.truncation import Truncation


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their completions.

    Attributes:
        tokens: int64 [B, T].
        valid: bool [B, T], False on padding.
        response_mask: bool [B, T], True after the prompt; never in column 0. Demonstrations: on the tokens to learn.
        experts: int16 [B, T, sparse layers, k] to replay, -1 where the router is to choose; None without replay.
        truncation: of the distributions that completions are sampled from, and scored under.
    """

    tokens: Tensor
    valid: Tensor
    response_mask: Tensor
    experts: Tensor | None = None
    truncation: Truncation | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        experts: Sequence[Tensor] | None = None,
        truncation: Truncation | None = None,
    ) -> "TokenBatch":
        """From token ids per row, at least one in each; `experts`: as in `rollout.engine.Completion`, by row."""
        rows = [list(prompt) + list(completion) for prompt, completion in zip(prompts, completions, strict=True)]
        tokens = pad(rows, torch.int64, 0)
        columns = torch.arange(tokens.shape[1])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        assert int(starts.min()) > 0, "an empty prompt"
        valid = columns < lengths
        routes = None if experts is None else _pad_experts(experts, tokens.shape[1])
        return cls(tokens, valid, valid & (columns >= starts), routes, truncation)

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]]) -> "TokenBatch":
        """The last token of each prompt serves as its completion."""
        return cls.of([tokens[:-1] or tokens for tokens in prompts], [tokens[-1:] for tokens in prompts])

    @property
    def prompt_mask(self) -> Tensor:
        return self.valid & ~self.response_mask

    @property
    def positions(self) -> Tensor:
        """int64 [B, T], from 0 in every row; 0 on padding."""
        return torch.where(self.valid, torch.arange(self.tokens.shape[1]), 0)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def slices(self, size: int) -> Iterator[tuple[slice, "TokenBatch"]]:
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            length = int(self.valid[rows].sum(-1).max())
            yield rows, self.part(rows, length)

    def part(self, rows: slice | list[int], length: int | None = None) -> "TokenBatch":
        tokens, valid, response_mask = (x[rows, :length] for x in (self.tokens, self.valid, self.response_mask))
        experts = None if self.experts is None else self.experts[rows, :length]
        return TokenBatch(tokens, valid, response_mask, experts, self.truncation)


@dataclass(frozen=True)
class RolloutBatch:
    """The data that one update learns from. Per-token tensors are [B, C], C the longest completion.

    Attributes:
        sequences: the tokens.
        policy_mask: bool [B, C], tokens that the policy wrote.
        rollout_logprobs: FP32, under the policy that sampled.
        old_logprobs: FP32, under the trainer's policy at the start of the step, or of tokens in `stale_mask` under
            the policy that wrote them; None for those of the one update's forward.
        reference_logprobs: FP32 under the reference policy, or None.
        advantages: FP32 [B].
        row_mask: bool [B], rows that may be in the loss.
        centred_rewards: FP32 [B], rewards minus the mean of their prompt group; None where rewards are not known.
        teacher_logprobs: FP32 under the teacher of a distillation, or None.
        audited: number of a row -> its name, of those whose log-probs under the trainer's policy must be the rollout's.
        observation_mask: bool [B, C], tokens of an environment, by its turns; None without any.
        stale_mask: bool [B, C], tokens of older policies, whose own log-probs are the old ones; None without any.
        accepted_mask: bool [B, C], tokens that the correction has not rejected; `row_mask` then has rows with any.
        weights: importance weights, float [B, C].
        denominator_mask: bool [B, C], the `loss_mask` that the correction has set.

    The last three are None until `Objective.corrected`.
    """

    sequences: TokenBatch
    policy_mask: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    advantages: Tensor
    row_mask: Tensor
    centred_rewards: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    audited: Mapping[int, str] = field(default_factory=dict)
    observation_mask: Tensor | None = None
    stale_mask: Tensor | None = None
    accepted_mask: Tensor | None = None
    weights: Tensor | None = None
    denominator_mask: Tensor | None = None

    @property
    def loss_mask(self) -> Tensor:
        """bool [B, C], tokens that the loss divides by."""
        if self.denominator_mask is not None:
            return self.denominator_mask
        return self.policy_mask & self.row_mask[:, None]

    @property
    def fresh_mask(self) -> Tensor:
        """bool [B, C], tokens whose rollout log-probs are under the policy at the start of the step."""
        return self.policy_mask if self.stale_mask is None else self.policy_mask & ~self.stale_mask

    def rows(self, rows: slice | list[int]) -> Self:
        parts: dict[str, Any] = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, sequences=self.sequences.part(rows), **parts)


def sampled_rows(policy_mask: Tensor, share: float, purpose: str) -> list[int]:
    """A share of the rows with a token in the mask, bool [B, C], ascending, and one at least; the text of `purpose`
    decides which."""
    rows = policy_mask.any(dim=1).nonzero()[:, 0].tolist()
    return sorted(shuffled(rows, purpose)[: math.ceil(share * len(rows))])


def shuffled(rows: Sequence[int], purpose: str) -> list[int]:
    """In an order that the text of `purpose` alone decides."""
    return sorted(rows, key=lambda row: hashlib.sha256(f"{purpose}/{row}".encode()).digest())


def _pad_experts(rows: Sequence[Tensor], length: int) -> Tensor:
    out = torch.full((len(rows), length, *rows[0].shape[1:]), -1, dtype=torch.int16)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def pad(rows: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype, value: float) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    out = torch.full((len(rows), max((len(row) for row in rows), default=0)), value, dtype=dtype)
    # In one piece: a tensor for each of hundreds of rows takes longer than the update of a small model.
    out[torch.arange(out.shape[1]) < lengths] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return out


def length_mask(rows: Sequence[Sequence[int] | Sequence[float]]) -> Tensor:
    return torch.arange(max(len(row) for row in rows)) < torch.tensor([len(row) for row in rows])[:, None]


def pad_column(column: pa.ChunkedArray, dtype: torch.dtype, value: float) -> Tensor:
    """A column of lists of numbers or of truth values, right-padded to [rows, longest]: `batch.pad` of its rows."""
    lists = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    values = lists.flatten()
    assert lists.null_count == values.null_count == 0, "a list or an element is missing"
    lengths = lists.value_lengths().to_numpy()
    elements = torch.tensor(values.to_numpy(zero_copy_only=False), dtype=dtype).numpy()
    width = int(lengths.max(initial=0))
    out = np.full((len(lengths), width), value, elements.dtype)
    out[np.arange(width) < lengths[:, None]] = elements
    return torch.from_numpy(out)


def column(values: Tensor, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.ListArray:
    """The first `lengths[i]` elements of every row of a tensor [rows, longest] as a column of lists."""
    assert lengths.max(initial=0) <= values.shape[1], "a row is shorter than its length"
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values.numpy()[np.arange(values.shape[1]) < lengths[:, None]])


def routes(column: pa.ChunkedArray) -> list[Tensor]:
    """Experts, int16 [positions, sparse layers, k], of each row of a `routes_column`."""
    return [_routes(chunk.slice(i, 1)) for chunk in column.chunks for i in range(len(chunk))]


def routes_column(rows: Sequence[Tensor]) -> pa.ChunkedArray:
    """Experts of rollouts (`rollout.engine.Completion`) as a column of lists of lists of lists, a chunk a row."""
    return pa.chunked_array([_layer_lists(row) for row in rows], pa.list_(pa.list_(pa.list_(pa.int16()))))


def _routes(row: pa.ListArray) -> Tensor:
    layers = row.flatten()
    positions = layers.flatten()
    experts = positions.flatten()
    missing = row.null_count + layers.null_count + positions.null_count + experts.null_count
    assert missing == 0, "the experts of a position are missing"
    shape = len(layers), len(positions) // len(layers), len(experts) // len(positions)
    return torch.tensor(experts.to_numpy(zero_copy_only=False), dtype=torch.int16).view(shape)


def _layer_lists(row: Tensor) -> pa.ListArray:
    positions, layers, k = row.shape
    position_experts = pa.ListArray.from_arrays(
        np.arange(positions * layers + 1, dtype=np.int32) * k, row.numpy().reshape(-1)
    )
    by_layer = pa.ListArray.from_arrays(np.arange(positions + 1, dtype=np.int32) * layers, position_experts)
    return pa.ListArray.from_arrays(np.array([0, positions], dtype=np.int32), by_layer)
