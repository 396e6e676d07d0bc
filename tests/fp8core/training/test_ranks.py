"""What ranks do together, as threads: weights that they keep, and errors of one of them."""

import pytest
import torch
from thread_ranks import on_threads
from torch import Tensor

from fp8core.errors import UserError
from fp8core.training import ranks
from fp8core.training.ranks import GroupNotFinite, Ranks, RankWeights, shared_out, together


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

    def act(group: Ranks) -> tuple[int, dict[str, Tensor]]:
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        kept = RankWeights(given, group)
        for tensor in given.values():
            tensor.zero_()
        return sum(map(len, kept._own)), kept.whole()

    results = on_threads(count, act)
    for _, found in results:
        assert found.keys() == tensors.keys()
        for name, tensor in found.items():
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
            assert torch.equal(tensor.contiguous().view(torch.uint8), tensors[name].contiguous().view(torch.uint8))
    sizes = [size for size, _ in results]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in tensors.values()) + 16


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
