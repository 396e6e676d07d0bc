"""The share of an optimiser's intention that reaches the policy which an engine multiplies: `train/update_gain`.

M are the FP32 weights of the linears that learn, Q is what is shipped of them. Since policy 0 they have changed by dM
and dQ. The gain is sum(dQ dM) / sum(dM dM), of a large model over `MOST_TILES` tiles. Sums are exact, so neither ranks
nor threads show."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8core.config.precision import LinearFormat
from fp8core.numerics.e4m3 import decode, tile_codes
from fp8core.numerics.recipe import TILE, Grouping

MOST_TILES = 1024
Sums = tuple[float, float]
"""sum(dQ dM) and sum(dM dM) of a tile."""
# Tiles of which FP64 differences are there at once.
_CHUNK = 64


class Tile(NamedTuple):
    """By the first row and column."""

    name: str
    row: int
    column: int

    def cut(self, rows: Tensor, first: int = 0) -> Tensor:
        """It out of rows of its weight, of which row `first` is the first."""
        return rows[self.row - first :, self.column :][:TILE, :TILE]


def sampled_tiles(shapes: Mapping[str, tuple[int, ...]]) -> list[Tile]:
    every = [
        Tile(name, row, column)
        for name, (rows, columns) in shapes.items()
        for row in range(0, rows, TILE)
        for column in range(0, columns, TILE)
    ]
    # An odd stride meets every column of tiles, whose number is mostly even.
    return every if len(every) <= MOST_TILES else every[:: math.ceil(len(every) / MOST_TILES) | 1]


class UpdateGain:
    def __init__(
        self,
        tiles: Sequence[Tile],
        read: Callable[[Sequence[Tile]], Iterable[Tensor]],
        form: Callable[[str], LinearFormat],
        grouping: Grouping,
        join: Callable[[list[Sums]], list[Sums]],
    ) -> None:
        """`read`: tiles, FP32, of the policy at the time of the call. `form`: what a weight is shipped in. `join`:
        the sums of all processes, from those of this one."""
        self._read = read
        self._grouping = grouping
        self._join = join
        # Those of one format behind one another.
        self._tiles = sorted(tiles, key=lambda tile: form(tile.name))
        self._forms = [form(tile.name) for tile in self._tiles]
        self._start = self._stack(self._tiles)

    @torch.no_grad()
    def measured(self) -> float | None:
        """None while nothing has changed. All ranks ask together."""
        own = list[Sums]()
        for first in range(0, len(self._tiles), _CHUNK):
            part = slice(first, first + _CHUNK)
            before = self._start[part]
            now = self._stack(self._tiles[part])
            change = now.double() - before.double()
            engine_change = self._engine_values(now, self._forms[part]) - self._engine_values(before, self._forms[part])
            sums = [(each * change).sum(-1).sum(-1).tolist() for each in (engine_change, change)]
            own += zip(*sums, strict=True)
        totals = self._join(own)
        whole = math.fsum(change for _, change in totals)
        return math.fsum(engine_change for engine_change, _ in totals) / whole if whole else None

    def _stack(self, tiles: Sequence[Tile]) -> Tensor:
        """FP32 [tiles, 128, 128], zero beyond an edge."""
        whole = [pad(each.detach(), (0, TILE - each.shape[1], 0, TILE - each.shape[0])) for each in self._read(tiles)]
        return torch.stack(whole) if whole else torch.empty(0, TILE, TILE)

    def _engine_values(self, tiles: Tensor, forms: Sequence[LinearFormat]) -> Tensor:
        values = tiles.double()
        for form in dict.fromkeys(forms):
            part = slice(forms.index(form), forms.index(form) + forms.count(form))
            if form == "bf16":
                values[part] = tiles[part].bfloat16().double()
            elif form == "fp8_block":
                group = self._grouping
                rows = tiles[part].bfloat16().reshape(-1, TILE)
                codes, scales = tile_codes(rows, group)
                factors = scales.double().repeat_interleave(group.rows, 0).repeat_interleave(group.columns, 1)
                values[part] = (decode(codes).double() * factors).view(-1, TILE, TILE)
        return values
