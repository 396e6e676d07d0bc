"""One rank's share of a pack: all of it, or of several ranks two chunks of the tokens (`training.context_parallel`).

| what                      | on one rank             | travels in each layer                                          |
| ------------------------- | ----------------------- | -------------------------------------------------------------- |
| activations, Q            | of its tokens           | never                                                          |
| K and V, rotated          | of the pack, at a time  | forward, as they are cached (E4M3 or BF16); backward, BF16     |
| gradients of K and V      | of its queries, at once | backward: each rank gets those of its tokens, and adds by rank |
| log-probs                 | of the pack             | once, so that all ranks have one loss                          |

Of 2 N chunks, rank i has number i and number 2 N - 1 - i: causal attention then costs all about the same. A chunk is
whole blocks of 128 tokens, so no quantised block is cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.fingerprint import bytes_in_order
from fp8core.numerics.packed import AttentionPack, AttentionPart, DevicePack, PackedSequences, copy_to
from fp8core.numerics.recipe import TILE
from fp8core.rl.batch import TokenBatch
from fp8core.training.packing import Pack
from fp8core.training.ranks import Ranks


def pack_multiple(ranks: int) -> int:
    """Tokens that the length of a pack is a multiple of."""
    return TILE if ranks == 1 else 2 * TILE * ranks


@dataclass(frozen=True)
class PackShare:
    """The part of a pack that a rank computes.

    Attributes:
        tokens: int64 [own tokens], on the device.
        sequences: int64 [own tokens], the row of the batch that each is of, -1 in filling.
        rows: int64 [own targets], of the own tokens that predict one.
        targets: int64 [own targets].
        joined: values of own targets, [own targets], to those of all, in the order of the pack; differentiable.
        summed: a tensor added over the ranks that share the pack, in their order."""

    tokens: Tensor
    sequences: Tensor
    attention: AttentionPack
    rows: Tensor
    targets: Tensor
    joined: Callable[[Tensor], Tensor]
    summed: Callable[[Tensor], Tensor]

    @property
    def valid(self) -> Tensor:
        """bool [own tokens], False in filling."""
        return self.sequences >= 0

    @classmethod
    def of(cls, batch: TokenBatch, ranks: Ranks, device: torch.device) -> "PackShare":
        """`ranks`: those that share the pack."""
        assert batch.experts is None, "a choice of experts is not replayed here"
        sequences = PackedSequences.of(batch.valid.sum(-1).tolist(), pack_multiple(ranks.count))
        pack = Pack.of(batch, slice(0, len(batch)), sequences)
        # Each written token is predicted by the position before it.
        predicting = pack.target_positions - 1
        targets = pack.tokens[pack.target_positions]
        owners = torch.where(sequences.valid, sequences.owners, -1)
        if ranks.count == 1:
            rows, targets, tokens, owners = _copied(device, predicting, targets, pack.tokens, owners)
            attention = DevicePack.of(sequences, device)
            return cls(tokens, owners, attention, rows, targets, lambda own: own, lambda own: own)
        chunks = PackChunks(sequences, ranks, device)
        of_ranks = chunks.find(predicting)
        own, own_rows = of_ranks[ranks.rank]
        own_tokens = (chunks.own(each) for each in (pack.tokens, owners))
        rows, targets, tokens, owners = _copied(device, own_rows, targets[own], *own_tokens)
        places = _copied(device, *(each for each, _ in of_ranks))

        def joined(values: Tensor) -> Tensor:
            of_all: Tensor = _OfAllTargets.apply(values, places, ranks)  # type: ignore[no-untyped-call]
            return of_all

        def summed(own: Tensor) -> Tensor:
            parts = ranks.gathered(bytes_in_order(own), [own.nbytes] * ranks.count)
            return torch.stack([part.view(own.dtype).view(own.shape) for part in parts]).sum(0)

        return cls(tokens, owners, chunks, rows, targets, joined, summed)


def _copied(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [copy_to(each, device) for each in tensors]


class PackChunks:
    """The tokens of one of several ranks; satisfies `AttentionPack`."""

    def __init__(self, sequences: PackedSequences, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._size = size = sequences.tokens // (2 * ranks.count)
        self._chunks = [slice(i * size, (i + 1) * size) for i in (ranks.rank, 2 * ranks.count - 1 - ranks.rank)]
        parts = list[AttentionPart]()
        for place, chunk in enumerate(self._chunks):
            begin, seen = sequences.context_of(chunk.start, chunk.stop)
            rows = slice(place * size, (place + 1) * size)
            pack = DevicePack.of(seen, device, chunk.start - begin)
            parts.append(AttentionPart(rows, slice(begin, chunk.stop), pack))
        self.parts = parts
        self.positions = copy_to(self.own(sequences.positions), device)

    def own(self, values: Tensor) -> Tensor:
        """[own tokens, ...] of [tokens of the pack, ...]."""
        return torch.cat([values[chunk] for chunk in self._chunks])

    def find(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each rank: which of these int64 [n] tokens of the pack are its own, and their rows there; int64."""
        count = self._ranks.count
        chunks = tokens // self._size
        rows = tokens % self._size + torch.where(chunks < count, 0, self._size)
        owners = torch.minimum(chunks, 2 * count - 1 - chunks)
        found = ((owners == rank).nonzero().squeeze(-1) for rank in range(count))
        return [(each, rows[each]) for each in found]

    def gathered(self, own: Tensor) -> Tensor:
        parts = self._ranks.gathered(bytes_in_order(own), [own.nbytes] * self._ranks.count)
        early, late = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat((*early, *reversed(late))).view(own.dtype).view(-1, *own.shape[1:])

    def summed(self, gradients: Tensor) -> Tensor:
        chunks = gradients.flatten(1).split(self._size)
        pairs = zip(chunks[: self._ranks.count], reversed(chunks), strict=False)
        total, *others = self._ranks.exchange([torch.cat(pair).view(-1) for pair in pairs])()
        for other in others:
            total = total + other
        return total.view(-1, *gradients.shape[1:])


class _OfAllTargets(torch.autograd.Function):
    """All ranks compute one loss of the result, so the gradient of own values is whole."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: list[Tensor], ranks: Ranks) -> Tensor:
        ctx.own = places[ranks.rank]
        parts = ranks.gathered(bytes_in_order(own), [len(each) * own.itemsize for each in places])
        result = own.new_empty(sum(map(len, places)))
        for each, part in zip(places, parts, strict=True):
            result[each] = part.view(own.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own], None, None
