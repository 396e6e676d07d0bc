"""The policy of a packed trainer that learns adapters (`training.lora`).

| what              | on one rank                 | travels                                               |
| ----------------- | --------------------------- | ----------------------------------------------------- |
| frozen weights    | its rows, BF16              | never                                                 |
| adapters, moments | all                         | never: every rank updates them alike                  |
| weights of a pass | all: codes and scales, BF16 | as of `masters.Masters`, of merged rows               |
| gradients         | all, of adapters            | once an update: each rank adds those of all, in order |"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fp8core.config.training import LoraConfig
from fp8core.models.architecture import Architecture
from fp8core.numerics.fingerprint import bytes_in_order, combine_sums, digest_of, fingerprints, slice_sums
from fp8core.numerics.lora import adapter_gradients
from fp8core.numerics.recipe import TILE
from fp8core.training.lora import LEFT_SUFFIX, RIGHT, Adapters, adapter_shapes, is_target
from fp8core.training.packed.masters import Masters, SharedRows
from fp8core.training.ranks import Ranks
from fp8core.training.update_gain import Tile


def _narrow(rows: Tensor, device: torch.device) -> Tensor:
    return rows.to(device, torch.bfloat16, copy=True, memory_format=torch.contiguous_format)


class _PolicyTensors(Mapping[str, Tensor]):
    """Tensors that are made as they are asked for, and not kept: FP32 of a whole model is nowhere."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self._names = list(names)
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class AdaptedMasters(SharedRows):
    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        lora: LoraConfig,
        seed: int,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        super().__init__(arch, ranks)
        assert self.shapes.keys() == weights.keys(), "weights of another model"
        self._lora = lora
        self._frozen = {name: _narrow(weights[name][self._own_slice(name)], device) for name in self.shapes}
        self._adapters = Adapters(self.shapes, lora, seed, device)
        self.learnt_shapes = adapter_shapes(self.shapes, lora)
        self._gradients: dict[str, Tensor] = {}
        self.base = digest_of(self._rounded(self._frozen))

    def own(self, name: str) -> Tensor:
        parts = [self._merged(part) for part, _ in self._stacks[name].parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def named(self) -> Mapping[str, Tensor]:
        return _PolicyTensors(self.shapes, self._merged)

    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        for tile in tiles:
            first = tile.row - self.rows_of(tile.name).start
            frozen = self._frozen[tile.name][first : first + TILE]
            rows = slice(tile.row, tile.row + len(frozen))
            yield tile.cut(self._adapters.policy_weight(tile.name, frozen, rows), tile.row)

    def looked_up(self, name: str) -> Tensor:
        ((part, _),) = self._stacks[name].parts
        return self._frozen[part]

    def digest(self) -> str:
        trainable = self._adapters.trainable
        digits = zip(trainable, fingerprints(list(trainable.values())), strict=True)
        adapters = {name: ("float32", self.learnt_shapes[name], each) for name, each in digits}
        return digest_of(self._rounded(self.named()) | adapters)

    def describe(self) -> dict[str, object]:
        return self._adapters.describe(self._frozen)

    def collects(self, name: str) -> bool:
        return any(is_target(part, self._lora) for part, _ in self._stacks[name].parts)

    def kept(self, name: str, gradient: Tensor) -> None:
        """Goes on to the adapters; nothing is kept."""
        stack = self._stacks[name]
        for (part, _), rows in zip(stack.parts, gradient.split([rows for _, rows in stack.parts]), strict=True):
            if (pair := self._adapters.of(part)) is None:
                continue
            module = part.removesuffix(".weight")
            of_pair = adapter_gradients(rows, *pair, self._adapters.factor)
            for side, side_gradient in zip((LEFT_SUFFIX, RIGHT), of_pair, strict=True):
                before = self._gradients.get(module + side)
                self._gradients[module + side] = side_gradient if before is None else before.add_(side_gradient)

    def collected(self, collectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of all adapters, added in the order of the ranks; zeros where no part has reached one."""
        own = {name: self._gradients.get(name, torch.zeros_like(tensor)) for name, tensor in self.trainable().items()}
        self.drop_gradients()
        if self._ranks.count == 1:
            return own
        flat = torch.cat([gradient.reshape(-1) for gradient in own.values()])
        first, *others = self._ranks.gathered(bytes_in_order(flat), [flat.nbytes] * self._ranks.count)
        total = first.view(torch.float32)
        for other in others:
            total = total + other.view(torch.float32)
        split = total.split([gradient.numel() for gradient in own.values()])
        return {name: each.view_as(own[name]) for name, each in zip(own, split, strict=True)}

    def drop_gradients(self) -> None:
        self._gradients = {}

    def trainable(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        return self._adapters.trainable if values is None else dict(values)

    def learnt_rows(self, name: str) -> range:
        return range(self.learnt_shapes[name][0])

    def whole_norm(self, own: float) -> float:
        return own

    def _own_slice(self, name: str) -> slice:
        rows = self.rows_of(name)
        return slice(rows.start, rows.stop)

    def _merged(self, name: str) -> Tensor:
        return self._adapters.policy_weight(name, self._frozen[name], self._own_slice(name))

    def _rounded(self, own: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """The input of `digest_of`, in BF16; one is made at a time."""
        sums = np.concatenate([slice_sums([self.slice_of(name, own[name].bfloat16())]) for name in own])
        digits = combine_sums(self._ranks.joined([sums]))
        return {name: ("bfloat16", self.shapes[name], each) for name, each in zip(own, digits, strict=True)}


PackedMasters = Masters | AdaptedMasters
