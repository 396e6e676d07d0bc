"""cuDNN's backward of attention, beside FlashAttention 2's and FP64."""

import pytest
import torch
from torch import Tensor

from fp8core.kernels.attention import _flash_attention
from fp8core.kernels.attention_backward import cudnn_gradients, flash_gradients, library, parts_of
from fp8core.numerics.fused import HeadLayout, Heads
from fp8core.numerics.packed import DevicePack, PackedSequences

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]

LAYOUT = HeadLayout(8, 2, 128)
PACKS = {
    "ragged": [700, 1, 33, 1300, 90],
    "one": [1000],
    "one token": [1],
    "one page less": [1008, 1024, 512],
    "many": [64, 17, 128, 300] * 9,
    "long": [6100, 20],
}


@pytest.fixture
def cudnn(gpu: torch.device) -> None:
    if library(128, gpu) is None:
        pytest.skip("needs cuDNN's frontend, on Hopper")


class Drawn:
    """A pack with its forward, and gradients of its output that are zero in filling."""

    def __init__(self, lengths: list[int], layout: HeadLayout = LAYOUT, seed: int = 0) -> None:
        self.pack = DevicePack.of(PackedSequences.of(lengths), torch.device("cuda"))
        sequences, self.layout = self.pack.sequences, layout
        sizes = (layout.query_heads, layout.kv_heads, layout.kv_heads, layout.query_heads)
        each = []
        for start, end in sequences.spans:
            # What a sequence holds depends on its own length alone.
            generator = torch.Generator().manual_seed(seed + end - start)
            each.append([torch.randn(end - start, n, layout.head_dim, generator=generator) for n in sizes])
        q, k, v, grad = (torch.cat(parts).bfloat16().cuda() for parts in zip(*each, strict=True))
        grad[~sequences.valid.cuda()] = 0
        self.heads, self.grad = (q, k, v), grad
        self.saved = _flash_attention(self.heads, self.pack)

    def found(self) -> Heads:
        return cudnn_gradients(self.grad, self.heads, self.saved, parts_of(self.pack.sequences, self.layout))

    def flash(self) -> Heads:
        return flash_gradients(self.grad, self.heads, self.saved, self.pack)

    def exact(self) -> list[Tensor]:
        """In FP64, one sequence at a time."""
        found = []
        for start, end in self.pack.sequences.spans:
            leaves = [x[start:end].double().requires_grad_() for x in self.heads]
            q, k, v = (x.transpose(0, 1) for x in leaves)
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            unseen = torch.ones(end - start, end - start, dtype=torch.bool, device="cuda").triu(1)
            weights = (q @ k.mT * self.layout.head_dim**-0.5).masked_fill(unseen, -torch.inf).softmax(-1)
            out = (weights @ v).transpose(0, 1)
            found.append(torch.autograd.grad(out, leaves, self.grad[start:end].double()))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def rows(self, grads: Heads, index: int) -> list[Tensor]:
        start, end = self.pack.sequences.spans[index]
        return [x[start:end] for x in grads]


def errors(found: Heads, exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((mine.double() - true).norm() / true.norm().clamp(min=1e-30)) for mine, true in pairs]


def check_near(drawn: Drawn) -> None:
    exact, found = drawn.exact(), drawn.found()
    assert all(bool(x.isfinite().all()) for x in found)
    mine, theirs = errors(found, exact), errors(drawn.flash(), exact)
    print(f"relative errors of dQ, dK, dV: {mine}, of FlashAttention 2 {theirs}")
    # One token alone has no gradient of Q and K but what rounding leaves.
    assert all(own <= 1.2 * other or own < 1e-2 * max(theirs) for own, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", [name for name in PACKS if name != "one token"])
def test_gradients_are_as_near_to_fp64_as_those_of_flash_attention(name: str) -> None:
    check_near(Drawn(PACKS[name], HeadLayout(2, 1, 128) if name == "long" else LAYOUT))


@pytest.mark.parametrize("name", PACKS)
def test_repeats_are_equal(name: str) -> None:
    drawn = Drawn(PACKS[name])
    first = [x.clone() for x in drawn.found()]
    for _ in range(5):
        assert all(map(torch.equal, drawn.found(), first))
