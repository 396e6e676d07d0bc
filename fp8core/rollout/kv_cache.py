"""Keys and values of completions that the embedded engine decodes together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StoredRow(NamedTuple):
    """K and V of a completion by layer, each [heads, tokens but the last, d]."""

    keys: list[Tensor]
    values: list[Tensor]


class KvCache:
    """K and V of a batch that is decoded together: left-padded prompts, one column a token (`models.decoder.Context`).

    `mask`: bool [B, 1, Tq, columns so far], for the call in progress.
    """

    def __init__(self, valid: Tensor, capacity: int, num_layers: int) -> None:
        """From the prompts' validity, bool [B, T], and room for `capacity` columns."""
        batch, length = valid.shape
        self._valid = torch.zeros(batch, capacity, dtype=torch.bool)
        self._valid[:, :length] = valid
        self._columns = 0
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self.mask = torch.empty(0)

    def begin(self, length: int) -> None:
        """Open `length` further columns, and set the mask of their queries."""
        start, self._columns = self._columns, self._columns + length
        if start:
            self._valid[:, start : self._columns] = True
        columns = torch.arange(self._columns)
        queries = columns[start:, None]
        visible = (columns <= queries) & self._valid[:, None, : self._columns]
        self.mask = (visible | (columns == queries))[:, None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            shape = (k.shape[0], k.shape[1], self._valid.shape[1], k.shape[3])
            keys, values = k.new_empty(shape), v.new_empty(shape)
            self._keys[layer], self._values[layer] = keys, values
        start = self._columns - k.shape[2]
        keys[:, :, start : self._columns] = k
        values[:, :, start : self._columns] = v
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    @classmethod
    def of(cls, rows: Sequence[StoredRow], room: int) -> "KvCache":
        lengths = [row.keys[0].shape[1] for row in rows]
        columns = torch.arange(longest := max(lengths))
        cache = cls(columns >= longest - torch.tensor(lengths)[:, None], longest + room, len(rows[0].keys))
        cache._columns = longest
        for layer in range(len(rows[0].keys)):
            cache._keys[layer] = _left_padded([row.keys[layer] for row in rows], longest, room)
            cache._values[layer] = _left_padded([row.values[layer] for row in rows], longest, room)
        return cache

    def stored(self, row: int) -> StoredRow:
        seen = self._valid[row, : self._columns]
        keys, values = (
            [part[row, :, : self._columns][:, seen] for part in parts if part is not None]
            for parts in (self._keys, self._values)
        )
        return StoredRow(keys, values)

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows of the batch: int64 [B']."""
        self._valid = self._valid[rows]
        self._keys = [None if keys is None else keys[rows] for keys in self._keys]
        self._values = [None if values is None else values[rows] for values in self._values]


def _left_padded(parts: Sequence[Tensor], longest: int, room: int) -> Tensor:
    heads, _, dim = parts[0].shape
    whole = parts[0].new_zeros(len(parts), heads, longest + room, dim)
    for row, part in zip(whole, parts, strict=True):
        row[:, longest - part.shape[1] : longest] = part
    return whole
