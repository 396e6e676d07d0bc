import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.rl.batch import pad
from fp8core.rl.columns import column, padded, routes, routes_column

ELEMENTS = {
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1), torch.int64),
    "float32": (pa.float32(), st.floats(-100, 0, width=32), torch.float64),
    "bool": (pa.bool_(), st.booleans(), torch.bool),
}


@pytest.mark.parametrize("name", ELEMENTS)
@given(data=st.data())
def test_a_column_is_padded_as_its_rows_are(name, data):
    element, values, dtype = ELEMENTS[name]
    chunks = data.draw(st.lists(st.lists(st.lists(values, max_size=5), max_size=4), max_size=3))
    column = pa.chunked_array([pa.array(rows, pa.list_(element)) for rows in chunks], pa.list_(element))
    found, expected = padded(column, dtype, 1), pad(column.to_pylist(), dtype, 1)
    assert found.dtype == expected.dtype == dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_some_rows_of_a_column_bring_their_own_elements_alone():
    column = pa.chunked_array([pa.array([[1, 2], [3], [4, 5, 6], []], pa.list_(pa.int32()))])
    assert padded(column[1:3], torch.int64, 0).tolist() == [[3, 0, 0], [4, 5, 6]]


@given(st.lists(st.lists(st.floats(-100, 0, width=32), max_size=5), max_size=6))
def test_a_column_is_what_was_padded(rows):
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    found = column(pad(rows, torch.float32, float("nan")), lengths)
    assert found.equals(pa.array(rows, pa.list_(pa.float32())))


def test_a_column_takes_no_more_than_there_is():
    with pytest.raises(AssertionError, match="shorter"):
        column(torch.zeros(2, 3), np.array([3, 4]))


@pytest.mark.parametrize("rows", [[[1], None], [[1, None]]])
def test_what_is_missing_is_not_padded_over(rows):
    with pytest.raises(AssertionError, match="is missing"):
        padded(pa.chunked_array([pa.array(rows, pa.list_(pa.int32()))]), torch.int64, 0)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), layers=st.integers(1, 3), k=st.integers(1, 3))
def test_experts_come_back_as_they_were_stored(lengths, layers, k):
    """Through one piece of memory too, where a row begins in the middle."""
    rows = [torch.randint(0, 128, (length, layers, k), dtype=torch.int16) for length in lengths]
    stored = routes_column(rows)
    assert stored.to_pylist() == [row.tolist() for row in rows]
    for read in (stored, pa.chunked_array([stored.combine_chunks()])):
        found = routes(read)
        assert len(found) == len(rows)
        assert all(torch.equal(a, b) and a.dtype == torch.int16 for a, b in zip(found, rows, strict=True))


@pytest.mark.parametrize("rows", [[None], [[None]], [[[None]]], [[[[1, None]]]]])
def test_experts_that_are_missing_are_no_experts(rows):
    column = pa.chunked_array([pa.array(rows, pa.list_(pa.list_(pa.list_(pa.int16()))))])
    with pytest.raises(AssertionError, match="the experts of a position are missing"):
        routes(column)
