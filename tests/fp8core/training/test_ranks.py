"""What ranks do together, as threads: weights that they keep, and errors of one of them."""

import threading

import pytest
import torch
from torch import Tensor

from fp8core.errors import UserError
from fp8core.training import ranks
from fp8core.training.ranks import ALONE, GroupNotFinite, Ranks, RankWeights, shared_out, together


class Group(Ranks):
    """One of several threads that make the same calls."""

    def __init__(self, rank: int, count: int, shared: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.count, self._shared, self._barrier = rank, count, shared, barrier

    def gathered(self, own, sizes):
        self._shared[self.rank] = own
        self._barrier.wait(10)
        assert [len(self._shared[rank]) for rank in range(self.count)] == list(sizes)
        return [self._shared[rank] for rank in range(self.count)]


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    found = {f"{n}": torch.randn(n, 3, generator=generator).bfloat16() for n in (1, 7, 40, 5, 64, 2)}
    found["scales"] = torch.randn(33, generator=generator)
    # Behind 7 x 3 numbers of 2 bytes, which do not end at a multiple of 4.
    found["bias"] = torch.randn(9, generator=generator)
    found["codes"] = torch.randint(0, 255, (33, 3), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    found["turned"] = torch.randn(5, 9, generator=generator).t()
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_all_ranks_get_all_bytes_back_and_keep_as_little_as_each_other(tensors, count, monkeypatch):
    monkeypatch.setattr(ranks, "_PIECE_BYTES", 100)
    expected, shared = {name: tensor.clone() for name, tensor in tensors.items()}, dict[int, Tensor]()
    barrier = threading.Barrier(count)
    groups = [ALONE] if count == 1 else [Group(rank, count, shared, barrier) for rank in range(count)]
    kept = [RankWeights(tensors, group) for group in groups]
    for tensor in tensors.values():
        tensor.view(-1).zero_() if tensor.is_contiguous() else tensor.t().zero_()
    found: dict[int, dict[str, Tensor]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank, each=each: found.update({rank: each.whole()}))
        for rank, each in enumerate(kept)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(count):
        assert found[rank].keys() == expected.keys()
        for name, tensor in found[rank].items():
            assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
            assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8))
    largest = max(tensor.nbytes for tensor in expected.values())
    sizes = [len(shared[rank]) for rank in shared]
    assert not sizes or max(sizes) - min(sizes) <= largest + 16


class Second(Ranks):
    """The second of two processes; the first has its result."""

    rank, count = 1, 2

    def __init__(self, first: object = "first") -> None:
        self._first, self.handed = first, list[object]()

    def own(self, parts):
        return range(1, parts, 2)

    def joined(self, own):
        self.handed += own
        return [self._first, *own]


@pytest.mark.parametrize("kind", [ValueError, GroupNotFinite, UserError])
def test_an_error_of_one_part_is_handed_to_all_before_it_is_raised(kind):
    ended, error = list[int](), kind("the second part")

    def compute(part):
        raise error

    with pytest.raises(kind, match="the second part"):
        shared_out(Second(), [0, 1], compute, ended.append)
    assert ended == [2]


@pytest.mark.parametrize("kind", [OSError, UserError])
def test_an_error_of_one_process_is_handed_to_all_before_it_is_raised(kind):
    error, second = kind("the disk is full"), Second()

    def act():
        raise error

    with pytest.raises(kind, match="the disk is full"):
        together(second, act)
    assert second.handed == [error]
    with pytest.raises(kind, match="the disk is full"):
        together(Second(error), lambda: "second")
    assert together(Second(), lambda: "second") == ["first", "second"]
