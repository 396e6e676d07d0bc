"""Columns of lists, as stored tables have them, to tensors and back, without a Python object for each token."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


def padded(column: pa.ChunkedArray, dtype: torch.dtype, value: float) -> Tensor:
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
    """A column of `routes_column`: int16 [positions, sparse layers, k] of each row."""
    return [_routes(chunk.slice(i, 1)) for chunk in column.chunks for i in range(len(chunk))]


def routes_column(rows: Sequence[Tensor]) -> pa.ChunkedArray:
    """Experts of rollouts (`rollout.engine.Completion`) as a column of lists of lists of lists, a chunk a row."""
    return pa.chunked_array([_nested(row) for row in rows], pa.list_(pa.list_(pa.list_(pa.int16()))))


def _routes(row: pa.ListArray) -> Tensor:
    layers = row.flatten()
    chosen = layers.flatten()
    experts = chosen.flatten()
    missing = row.null_count + layers.null_count + chosen.null_count + experts.null_count
    assert missing == 0, "the experts of a position are missing"
    shape = len(layers), len(chosen) // len(layers), len(experts) // len(chosen)
    return torch.tensor(experts.to_numpy(zero_copy_only=False), dtype=torch.int16).view(shape)


def _nested(row: Tensor) -> pa.ListArray:
    positions, layers, k = row.shape
    chosen = pa.ListArray.from_arrays(np.arange(positions * layers + 1, dtype=np.int32) * k, row.numpy().reshape(-1))
    by_layer = pa.ListArray.from_arrays(np.arange(positions + 1, dtype=np.int32) * layers, chosen)
    return pa.ListArray.from_arrays(np.array([0, positions], dtype=np.int32), by_layer)
