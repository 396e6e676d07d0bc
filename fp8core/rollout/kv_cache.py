"""The KV cache of the embedded engine: stored K and V of a batch that is decoded together."""

import torch
from torch import Tensor


class KvCache:
    """Left-padded prompts, one column per token; satisfies `models.decoder.Context`.

    Attributes:
        mask: bool [B, 1, Tq, columns so far], for the call in progress.
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
        """Open `length` further columns and set the mask of the queries in them."""
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

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows of the batch: int64 [B']."""
        self._valid = self._valid[rows]
        self._keys = [None if keys is None else keys[rows] for keys in self._keys]
        self._values = [None if values is None else values[rows] for values in self._values]
