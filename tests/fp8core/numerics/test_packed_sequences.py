import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8core.numerics.packed_sequences import PAGE, PackedSequences, packed_length


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_a_pack_is_whole_pages_and_whole_groups(lengths: list[int]) -> None:
    pack = PackedSequences.of(lengths)
    assert pack.tokens % 128 == 0
    assert all(start % PAGE == 0 for start in pack.starts)
    assert pack.lengths[: len(lengths)] == tuple(lengths)
    assert pack.tokens - sum(map(packed_length, lengths)) < 128
    for tensor in (pack.positions, pack.offsets, pack.valid, pack.owners):
        assert tensor.shape == (pack.tokens,)
    assert int(pack.valid.sum()) == sum(lengths)
    for index, (length, (start, end)) in enumerate(zip(pack.lengths, pack.spans, strict=True)):
        assert end - start <= pack.longest
        assert torch.equal(pack.offsets[start:end], torch.arange(end - start))
        assert torch.equal(pack.positions[start : start + length], torch.arange(length))
        assert not pack.positions[start + length : end].any()
        assert pack.valid[start:end].tolist() == [True] * length + [False] * (end - start - length)
        assert set(pack.owners[start:end].tolist()) == {index}


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_nothing_is_not_packed(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        PackedSequences.of(lengths)
