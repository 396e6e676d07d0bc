"""The parameters of the packed decoder, cut into whole tiles of rows over the ranks, and what ranks exchange of them.

| what              | on one rank                 | travels                                                            |
| ----------------- | --------------------------- | ------------------------------------------------------------------ |
| masters, moments  | its rows, FP32              | never                                                              |
| weights of a pass | all: codes and scales, BF16 | once an update: each rank makes those of its rows, for all         |
| gradients         | all, FP32                   | once an update: each rank gets its rows from all, and adds by rank |

`PassMasters` let gradients of linears travel with every pass, so that a rank has those of its rows alone. Tiles of 128
rows are never cut, so codes and scales are those of one GPU."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.models.families import layer_parts
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.fingerprint import LaneSums, PolicyRows, Slice, bytes_in_order, combine_sums, sums_reader
from fp8core.numerics.recipe import TILE
from fp8core.training.ranks import Ranks
from fp8core.training.trainer import shares
from fp8core.training.update_gain import Tile

Unit = dict[str, "Stack"]


class Stack(NamedTuple):
    """A parameter as GEMMs read it: tensors of the checkpoint, one above the other.

    `parts`: Hugging Face name and rows of each. `width`: the other dimensions."""

    parts: tuple[tuple[str, int], ...]
    width: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(rows for _, rows in self.parts), *self.width


def units_of(arch: Architecture) -> list[Unit]:
    """Parameters that travel together, by their names in the decoder."""
    hidden = (arch.hidden_size,)
    layers = [
        {f"layers.{index}.{name}": stack for name, stack in layer_stacks(arch, index).items()}
        for index in range(arch.num_layers)
    ]
    embedding = {"embedding": Stack((("model.embed_tokens.weight", arch.vocab_size),), hidden)}
    head = {} if arch.tie_embeddings else {"head": Stack((("lm_head.weight", arch.vocab_size),), hidden)}
    norm = {"norm": Stack((("model.norm.weight", *hidden),), ())}
    return [embedding, *layers, norm, *([head] if head else [])]


def layer_stacks(arch: Architecture, index: int) -> dict[str, Stack]:
    layer = layer_parts(arch)
    hidden = (arch.hidden_size,)
    query = arch.num_heads * arch.head_dim
    key = arch.num_kv_heads * arch.head_dim

    def stack(shape: tuple[int, ...], *parts: tuple[str, int]) -> Stack:
        return Stack(tuple((f"model.layers.{index}.{name}.weight", rows) for name, rows in parts), shape)

    projections = [(f"self_attn.{name}_proj", rows) for name, rows in zip("qkv", (query, key, key), strict=True)]
    biases = tuple((f"model.layers.{index}.{name}.bias", rows) for name, rows in projections)
    mlps, width, router = ["mlp"], arch.intermediate_size, dict[str, Stack]()
    if arch.experts is not None and index in arch.sparse_layers:
        mlps, width = [f"mlp.experts.{e}" for e in range(arch.experts.count)], arch.experts.intermediate_size
        router = {"router": stack(hidden, ("mlp.gate", arch.experts.count))}
    heads = {f"{name}_norm": stack((), (f"self_attn.{name}_norm", arch.head_dim)) for name in "qk"}
    return {
        "input_norm": stack((), (layer.attention_norm, *hidden)),
        "qkv": stack(hidden, *projections),
        **({"qkv_bias": Stack(biases, ())} if layer.qkv_bias else {}),
        **(heads if layer.qk_norm else {}),
        "output": stack((query,), ("self_attn.o_proj", *hidden)),
        "post_norm": stack((), (layer.mlp_norm, *hidden)),
        **router,
        "gate_up": stack(hidden, *((f"{mlp}.{half}_proj", width) for mlp in mlps for half in ("gate", "up"))),
        "down": stack((width,), *((f"{mlp}.down_proj", *hidden) for mlp in mlps)),
    }


def own_rows(rows: int, rank: int, count: int) -> range:
    """The rows of a tensor that one of `count` ranks has: whole tiles."""
    tiles = math.ceil(rows / TILE)
    first, last = (min(rows, TILE * (tiles * each // count)) for each in (rank, rank + 1))
    return range(first, last)


def largest_share(shapes: Iterable[tuple[int, ...]], count: int) -> int:
    """Elements of the one of `count` ranks that has the most. Narrow tensors have fewer tiles than there are ranks."""
    equal = Counter(shapes)

    def share(rank: int) -> int:
        return sum(n * len(own_rows(rows, rank, count)) * math.prod(width) for (rows, *width), n in equal.items())

    return max(map(share, range(count)))


class SharedRows:
    """The rows of all parameters that one rank has. `shapes`: whole ones, by Hugging Face name."""

    def __init__(self, arch: Architecture, ranks: Ranks) -> None:
        self.units = units_of(arch)
        self._ranks = ranks
        self._stacks = {name: stack for unit in self.units for name, stack in unit.items()}
        self.shapes = {name: (rows, *stack.width) for stack in self._stacks.values() for name, rows in stack.parts}

    def end_passes(self, passes: int) -> None:
        """This rank is done or failed; `passes` is the largest number of any rank."""

    def parts(self, name: str) -> list[int]:
        """Own rows of each part of a parameter, by its name in the decoder."""
        return self._rows(self._stacks[name], self._ranks.rank)

    def rows_of(self, name: str) -> range:
        """By Hugging Face name."""
        return own_rows(self.shapes[name][0], self._ranks.rank, self._ranks.count)

    def gathered(self, parts: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
        """Whole tensors from what each rank made of its rows: a tensor, or codes and scales of tiles."""
        items = [
            (tensor, [rows for _, rows in self._stacks[name].parts], step)
            for name, tensors in parts.items()
            for tensor, step in zip(tensors, (1, TILE), strict=False)
        ]
        whole = iter(self._gathered(items))
        return {name: [next(whole) for _ in tensors] for name, tensors in parts.items()}

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `gathered`, of tensors by Hugging Face name."""
        whole = self._gathered([(tensor, [self.shapes[name][0]], 1) for name, tensor in parts.items()])
        return dict(zip(parts, whole, strict=True))

    def split(self, name: str, whole: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parts of what `gathered` gave of a parameter, by Hugging Face name; scales by theirs."""
        parts = self._stacks[name].parts
        tensors = dict[str, Tensor]()
        for tensor, suffix, step in zip(whole, ("", SCALE_SUFFIX), (1, TILE), strict=False):
            pieces = tensor.split([-(-rows // step) for _, rows in parts])
            tensors |= {part + suffix: piece for (part, _), piece in zip(parts, pieces, strict=True)}
        return tensors

    def _gathered(self, own_parts: Sequence[tuple[Tensor, list[int], int]]) -> list[Tensor]:
        """From own rows of each, the rows of its parts, and how many of them a row stands for."""
        if self._ranks.count == 1:
            return [tensor for tensor, _, _ in own_parts]
        pieces = [self._pieces(*each) for each in own_parts]
        sizes = [[part[rank] for parts in pieces for part in parts] for rank in range(self._ranks.count)]
        flat = torch.cat([bytes_in_order(tensor) for tensor, _, _ in own_parts])
        values = self._ranks.gathered(flat, [sum(each) for each in sizes])
        split = [iter(flat_part.split(each)) for flat_part, each in zip(values, sizes, strict=True)]
        wholes = list[Tensor]()
        for (tensor, _, _), parts in zip(own_parts, pieces, strict=True):
            whole = torch.cat([next(each) for _ in parts for each in split])
            wholes.append(whole.view(tensor.dtype).view(-1, *tensor.shape[1:]))
        return wholes

    def summing(self, gradients: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Begin to exchange whole gradients; the result gives the own rows, added in the order of the ranks; FP32."""
        count = self._ranks.count
        if count == 1:
            return lambda: dict(gradients)
        parts: list[list[Tensor]] = [[] for _ in range(count)]
        for name, gradient in gradients.items():
            stack = self._stacks[name]
            for (_, rows), part in zip(stack.parts, gradient.split([rows for _, rows in stack.parts]), strict=True):
                for rank, rows_of_rank in enumerate(parts):
                    own = own_rows(rows, rank, count)
                    rows_of_rank.append(part[own.start : own.stop].reshape(-1))
        names = list(gradients)
        rank_rows = self._ranks.exchange([torch.cat(rows_of_rank) for rows_of_rank in parts])

        def summed() -> dict[str, Tensor]:
            total, *others = rank_rows()
            for other in others:
                total = total + other
            stacks = [self._stacks[name] for name in names]
            shapes = [(sum(self._rows(stack, self._ranks.rank)), *stack.width) for stack in stacks]
            split = total.split([math.prod(shape) for shape in shapes])
            return {name: own.view(shape) for name, own, shape in zip(names, split, shapes, strict=True)}

        return summed

    def slice_of(self, name: str, own: Tensor) -> Slice:
        rows = self.rows_of(name)
        shape = self.shapes[name]
        ends = math.prod(shape) * own.itemsize if rows.stop == shape[0] and len(rows) else None
        return Slice(own, rows.start * math.prod(shape[1:]) * own.itemsize, ends)

    def _rows(self, stack: Stack, rank: int) -> list[int]:
        return [len(own_rows(rows, rank, self._ranks.count)) for _, rows in stack.parts]

    def _pieces(self, tensor: Tensor, parts: Sequence[int], step: int) -> list[list[int]]:
        """Bytes of each part of a tensor on each rank."""
        row = math.prod(tensor.shape[1:]) * tensor.itemsize
        count = self._ranks.count
        return [[math.ceil(len(own_rows(rows, rank, count)) / step) * row for rank in range(count)] for rows in parts]


class Masters(SharedRows):
    """FP32 masters that all learn. `base`: digest of what is frozen. `learnt_shapes`: whole ones, of what learns."""

    base: str | None = None

    def __init__(self, arch: Architecture, weights: Mapping[str, Tensor], device: torch.device, ranks: Ranks) -> None:
        super().__init__(arch, ranks)
        self.learnt_shapes = self.shapes
        self._own = {
            name: torch.empty(sum(self._rows(stack, ranks.rank)), *stack.width, device=device)
            for name, stack in self._stacks.items()
        }
        # Experts are thousands of tensors, which take milliseconds to find.
        self._named = self._by_name(self._own)
        assert self._named.keys() == weights.keys(), "masters of another model"
        for name, master in self._named.items():
            rows = self.rows_of(name)
            # Narrow weights become FP32 where they are going.
            master.copy_(weights[name][rows.start : rows.stop].to(device))

    def trainable(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Tensors that learn on this rank, or those that `collected` gave, by the names of `learnt_shapes`."""
        return self._named if values is None else self._by_name(values)

    def _by_name(self, stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, own in stacks.items():
            stack = self._stacks[name]
            views = own.split(self._rows(stack, self._ranks.rank))
            tensors |= {part: view for (part, _), view in zip(stack.parts, views, strict=True)}
        return tensors

    def own(self, name: str) -> Tensor:
        """FP32 [own rows, ...], by its name in the decoder."""
        return self._own[name]

    def named(self) -> dict[str, Tensor]:
        """FP32 [own rows, ...] by Hugging Face name."""
        return self._named

    def learnt_rows(self, name: str) -> range:
        return self.rows_of(name)

    def tiles(self, tiles: Sequence[Tile]) -> list[Tensor]:
        return [tile.cut(self._named[tile.name], self.rows_of(tile.name).start) for tile in tiles]

    def looked_up(self, name: str) -> Tensor:
        """Own rows to find single ones in, in BF16 values or wider."""
        return self._own[name] if self._ranks.count == 1 else self._own[name].bfloat16()

    def digest(self) -> str:
        sums: LaneSums = self._read_sums().cpu().numpy()
        return self._policy_rows.digest(combine_sums(self._ranks.joined([sums])))

    @cached_property
    def _read_sums(self) -> Callable[[], Tensor]:
        return sums_reader(*zip(*(self.slice_of(*each) for each in self._named.items()), strict=True))

    @cached_property
    def _policy_rows(self) -> PolicyRows:
        return PolicyRows({name: ("float32", self.shapes[name]) for name in self._named})

    def describe(self) -> dict[str, object]:
        return {}

    def collects(self, name: str) -> bool:
        return True

    def kept(self, name: str, gradient: Tensor) -> Tensor | None:
        """The part of a gradient that the collector of a linear keeps, after each pack."""
        return gradient

    def collected(self, collectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of all packs of all ranks, which the collectors give away."""
        gradients: dict[str, Tensor] = {}
        # The order of a backward, so that what is whole goes as early as it can.
        for unit in reversed(self.units):
            gradients |= self.summing({name: _take_values(collectors[name]) for name in unit})()
        return gradients

    def drop_gradients(self) -> None:
        """Collectors have them all."""

    def whole_norm(self, own: float) -> float:
        return math.hypot(*self._ranks.joined([own]))


class PassMasters(Masters):
    """Masters whose gradients of linears travel in each pass (`training.reduce_gradients=per_pass`, ZeRO stage 2).

    All ranks exchange in the order of a backward. A rank that has fewer passes, or fails in one, exchanges zeros. A
    gradient travels while the backward goes on to the next."""

    def __init__(self, arch: Architecture, weights: Mapping[str, Tensor], device: torch.device, ranks: Ranks) -> None:
        super().__init__(arch, weights, device, ranks)
        self._order = [
            name
            for unit in reversed(self.units)
            for name, stack in reversed(unit.items())
            if stack.width and name.startswith("layers.")
        ]
        self._sums: dict[str, Tensor] = {}
        self._exchanges = 0
        self._travelling: Callable[[], dict[str, Tensor]] = dict

    def kept(self, name: str, gradient: Tensor) -> None:
        expected = self._order[self._exchanges % len(self._order)]
        assert name == expected, f"a backward gave {name} where ranks exchange {expected}"
        arriving = self._travelling
        self._travelling = self.summing({name: gradient})
        self._exchanges += 1
        self._add(arriving())

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            before = self._sums.get(name)
            self._sums[name] = gradient if before is None else before.add_(gradient)

    def end_passes(self, passes: int) -> None:
        while self._exchanges < passes * len(self._order):
            name = self._order[self._exchanges % len(self._order)]
            self.kept(name, torch.zeros(self._stacks[name].shape, device=self._own[name].device))
        arriving = self._travelling
        self._travelling = dict
        self._add(arriving())

    def collected(self, collectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for unit in reversed(self.units):
            whole = {name: _take_values(collectors[name]) for name in unit if name not in self._sums}
            gradients |= self.summing(whole)() | {name: self._sums[name] for name in unit if name in self._sums}
        self.drop_gradients()
        return gradients

    def drop_gradients(self) -> None:
        self._sums = {}
        self._exchanges = 0
        self._travelling = dict


def _take_values(collector: Tensor) -> Tensor:
    """The gradient, which the collector gives away; zeros where no part of this rank has reached it."""
    gradient = collector.grad
    collector.grad = None
    return torch.zeros_like(collector, memory_format=torch.contiguous_format) if gradient is None else gradient


def balance(costs: Sequence[int], ranks: int) -> list[int]:
    """Indices of parts in an order in which the contiguous shares of all ranks cost about the same (longest processing
    time first)."""
    room = [part.stop - part.start for part in shares(len(costs), ranks)]
    of_rank: list[list[int]] = [[] for _ in room]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        open_ranks = [rank for rank, most in enumerate(room) if len(of_rank[rank]) < most]
        of_rank[min(open_ranks, key=lambda rank: sum(costs[each] for each in of_rank[rank]))].append(index)
    return [index for share in of_rank for index in sorted(share)]
