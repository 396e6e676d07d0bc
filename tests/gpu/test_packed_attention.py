"""Packed attention with its kernels: results that are kept, and what it was before torch's own functions did it all."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fp8core.kernels.attention import DecodeAttention
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.e4m3 import E4M3_MAX
from fp8core.numerics.fused import HeadLayout, heads_of, static_codes
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import (
    Bf16PackedAttention,
    DevicePack,
    Fp8PackedAttention,
    KeptAttention,
    PackedAttention,
    PackedSequences,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

LAYOUT = HeadLayout(query_heads=32, kv_heads=8, head_dim=128)
SCALES = LayerScales(2.0**-7, 2.0**-6, 2.0**-7)
FORMS: dict[str, PackedAttention] = {"bf16": Bf16PackedAttention(Bf16Attention()), "fp8": Fp8PackedAttention(4096)}


@pytest.fixture(scope="module")
def pack() -> DevicePack:
    return DevicePack.of(PackedSequences.of([700, 1, 33, 1300]), torch.device("cuda"))


@pytest.fixture(scope="module")
def qkv(pack: DevicePack) -> Tensor:
    """Some elements are saturated under the scales."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(pack.sequences.tokens, 48 * 128, generator=generator)).bfloat16().cuda()


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradient(attend: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv.detach().requires_grad_()
    out = attend(leaf)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    return out.detach(), torch.autograd.grad(out, leaf, upstream)[0]


def varlen(q: Tensor, k: Tensor, v: Tensor, pack: DevicePack) -> Tensor:
    """torch's own function with torch's own gradient."""
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    longest = pack.sequences.longest
    out = varlen_attn(q, k, v, pack.starts, pack.starts, longest, longest, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("name", FORMS)
def test_a_kept_result_has_the_same_gradient(name: str, qkv: Tensor, pack: DevicePack) -> None:
    expected = gradient(lambda x: FORMS[name](x, LAYOUT, pack, SCALES), qkv)
    kept = KeptAttention()
    with torch.no_grad():
        first = FORMS[name](qkv, LAYOUT, pack, SCALES, kept)
    pointer = first.data_ptr()
    found = gradient(lambda x: FORMS[name](x, LAYOUT, pack, SCALES, kept), qkv)
    assert found[0].data_ptr() == pointer
    assert kept.take() is None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_bf16_is_torchs_own_function_and_gradient(qkv: Tensor, pack: DevicePack) -> None:
    expected = gradient(lambda x: varlen(*heads_of(x, LAYOUT), pack).flatten(1), qkv)
    found = gradient(lambda x: FORMS["bf16"](x, LAYOUT, pack, None), qkv)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_gradient_of_fp8_is_that_of_torchs_operations(qkv: Tensor, pack: DevicePack) -> None:
    class StoodFor(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, scale: float) -> Tensor:
            ctx.save_for_backward(x.abs() <= E4M3_MAX * scale)
            return (static_codes(x, scale).float() * scale).bfloat16()

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.saved_tensors[0], None

    def attend(x: Tensor) -> Tensor:
        heads = zip(heads_of(x, LAYOUT), (SCALES.q, SCALES.k, SCALES.v), strict=True)
        return varlen(*(StoodFor.apply(part, scale) for part, scale in heads), pack).flatten(1)

    _out, expected = gradient(attend, qkv)
    _out, found = gradient(lambda x: FORMS["fp8"](x, LAYOUT, pack, SCALES), qkv)
    assert 0 < (expected == 0).float().mean() < 0.5
    assert torch.equal(found, expected)


def test_fp8_decodes_once(qkv: Tensor, pack: DevicePack, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = DecodeAttention.__call__, []

    def counted(self, *arguments) -> None:
        calls.append(len(arguments))
        decode(self, *arguments)

    monkeypatch.setattr(DecodeAttention, "__call__", counted)
    kept = KeptAttention()
    with torch.no_grad():
        FORMS["fp8"](qkv, LAYOUT, pack, SCALES, kept)
    gradient(lambda x: FORMS["fp8"](x, LAYOUT, pack, SCALES, kept), qkv)
    assert len(calls) == 1
