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
