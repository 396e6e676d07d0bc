"""Columns of lists, as stored tables have them, to padded tensors and back, without a Python object for each token."""

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
