"""cuDNN's backward of attention, beside FlashAttention 2's and FP64."""

import pytest
import torch
from torch import Tensor

from fp8core.kernels import attention_backward
from fp8core.kernels.attention import _flash_attention
from fp8core.kernels.attention_backward import (
    Part,
    Shape,
    attention_gradients,
    cudnn_gradients,
    describe,
    flash_gradients,
    library,
    parts_of,
)
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


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_all_groups_of_heads(group: int, head_dim: int) -> None:
    check_near(Drawn([300, 33, 700], HeadLayout(2 * group, 2, head_dim)))


def test_a_token_alone_passes_its_gradient_to_its_value() -> None:
    drawn = Drawn(PACKS["one token"], HeadLayout(2, 2, 128))
    grad_q, grad_k, grad_v = drawn.found()
    assert torch.equal(grad_v[0], drawn.grad[0])
    assert max(float(x.float().abs().max()) for x in (grad_q, grad_k)) < 1e-2
    assert not any(x[1:].any() for x in (grad_q, grad_k, grad_v))


@pytest.mark.parametrize("name", PACKS)
def test_repeats_are_equal(name: str) -> None:
    drawn = Drawn(PACKS[name])
    first = [x.clone() for x in drawn.found()]
    for _ in range(5):
        assert all(map(torch.equal, drawn.found(), first))


@pytest.mark.parametrize(
    ("lengths", "others"),
    [([700, 33, 500], [400]), ([700, 33, 500], [1]), ([1000, 90, 300, 300, 17], [90, 1000, 640])],
)
def test_what_else_fills_a_class_changes_nothing(lengths: list[int], others: list[int]) -> None:
    alone, filled = Drawn(lengths), Drawn([*lengths, *others])
    shapes = [parts_of(each.pack.sequences, LAYOUT)[0].shape for each in (alone, filled)]
    assert shapes[0][:2] == shapes[1][:2], "another class of lengths"
    found = alone.found(), filled.found()
    for index in range(len(lengths)):
        assert all(map(torch.equal, alone.rows(found[0], index), filled.rows(found[1], index)))


def test_what_fills_the_pack_up_has_no_gradient_whatever_memory_holds() -> None:
    """In the FP8 forward, filling has an infinite log-sum-exp."""
    drawn = Drawn([700, 33, 90])
    out, logsumexp = drawn.saved
    filling = ~drawn.pack.sequences.valid.cuda()
    logsumexp = logsumexp.masked_fill(filling, torch.inf)
    drawn.saved = out.masked_fill(filling[:, None, None], 0), logsumexp
    expected = drawn.exact()
    torch.full((1 << 28,), torch.nan, device="cuda")  # Left to whoever allocates next.
    found = drawn.found()
    assert not any(x[filling].any() for x in found)
    assert max(errors(found, expected)) < 0.01


def test_parts_of_a_pack_are_as_near_as_the_whole() -> None:
    drawn = Drawn([700, 33, 1300, 90, 400])
    exact, (whole,) = drawn.exact(), parts_of(drawn.pack.sequences, LAYOUT)
    halves = whole.starts[:3], whole.starts[2:]
    parts = [Part(Shape.of(torch.tensor(half).diff().tolist()), half) for half in halves]
    found = cudnn_gradients(drawn.grad, drawn.heads, drawn.saved, parts)
    pairs = zip(errors(found, exact), errors(drawn.found(), exact), strict=True)
    assert all(own <= 1.1 * other for own, other in pairs)


@pytest.mark.parametrize(
    ("lengths", "layout"),
    [
        ([1024] * 16, HeadLayout(32, 8, 128)),
        ([4096], HeadLayout(32, 8, 128)),
        ([1500] * 3, LAYOUT),
        ([512] * 5, HeadLayout(4, 4, 64)),
    ],
)
def test_a_class_takes_the_memory_that_is_counted(lengths: list[int], layout: HeadLayout) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = Shape.of(lengths)
    taken, counted = attention_backward._graph(shape, layout, device).workspace, shape.workspace(layout)
    print(f"{shape}: {taken / 1e9:.3f} GB, counted {counted / 1e9:.3f} GB")
    assert taken <= 1.05 * counted + (1 << 21)


def test_it_is_taken_where_it_is_described_and_otherwise_flash_attention_is() -> None:
    drawn = Drawn([300, 33, 700])
    assert describe(128, drawn.grad.device).startswith("cuDNN 9.")
    assert describe(96, drawn.grad.device) == "FlashAttention 2 of torch"
    found = attention_gradients(drawn.grad, drawn.heads, drawn.saved, drawn.pack)
    assert all(map(torch.equal, found, drawn.found()))
    torch.use_deterministic_algorithms(True)
    try:
        wide = Drawn([90, 40], HeadLayout(2, 1, 96))
        assert all(map(torch.equal, attention_gradients(wide.grad, wide.heads, wide.saved, wide.pack), wide.flash()))
    finally:
        torch.use_deterministic_algorithms(False)
