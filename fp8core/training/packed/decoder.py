"""The decoder as modules over packed sequences.

Parameters only collect gradients; their values are in `masters.Masters`, and passes multiply with what was made of all
rows (`cache_weights`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.models.architecture import Architecture
from fp8core.models.decoder import rotary_tables
from fp8core.models.router_losses import RouterLosses
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.kv_scales import Scales
from fp8core.numerics.packed import AttentionPack, PackedAttention
from fp8core.training.packed.adapted import PackedMasters
from fp8core.training.packed.blocks import Blocks, Norm, norm_only
from fp8core.training.packed.experts import SparseLayer
from fp8core.training.packed.layer import (
    LINEARS,
    Keep,
    LayerActivations,
    LayerContext,
    Observer,
    PackedLayer,
    collector,
    to_bf16,
)
from fp8core.training.packed.masters import Stack, layer_stacks, units_of


class _Layer(torch.autograd.Function):
    """`save_for_backward` avoids a reference cycle that would leak `total`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        run: Callable[..., tuple[Tensor, Tensor]],
        layer: PackedLayer,
        context: LayerContext,
        *collectors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.shared = context
        ctx.kept = LayerActivations()
        total, more = run(layer, x, delta, context, ctx.kept)
        ctx.save_for_backward(total)
        return total, more

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_delta: Tensor) -> tuple[Tensor | None, ...]:
        (total,) = ctx.saved_tensors
        kept = ctx.kept
        ctx.kept = None
        grad, vectors = ctx.layer.backward(grad_total, grad_delta, total, ctx.shared, kept)
        # The gradient of what was added to the residual stream is the stream's own.
        of_delta = grad if ctx.needs_input_grad[1] else None
        return grad, of_delta, None, None, None, *(vectors.get(name) for name, _ in ctx.layer.named_parameters())


class PackedDecoder(nn.Module):
    """Embedding, layers, final norm; the head is `head_weight`."""

    def __init__(
        self, arch: Architecture, blocks: Sequence[Blocks], device: torch.device, recompute: bool, keep: Keep
    ) -> None:
        """`recompute`: the backward computes again what `LayerActivations` need not have."""
        super().__init__()
        self.arch = arch
        self._run = PackedLayer.forward if recompute else PackedLayer.kept_forward
        shapes = {name: stack.shape for unit in units_of(arch) for name, stack in unit.items()}
        self.layers = nn.ModuleList(
            form(arch, i, blocks[i], layer_stacks(arch, i), device, keep) for i, form in enumerate(_forms(arch))
        )
        self.embedding, self.norm = (collector(device, shapes[name]) for name in ("embedding", "norm"))
        self.head = collector(device, shapes["head"]) if "head" in shapes else None
        self._values: dict[str, Tensor] = {}
        cos, sin = rotary_tables(arch)
        self._cos, self._sin = (table.bfloat16().float().to(device) for table in (cos, sin))

    def head_weight(self) -> tuple[nn.Parameter, Tensor]:
        """[vocabulary, hidden]: what collects its gradient, and the BF16 values."""
        return self.embedding if self.head is None else self.head, self._values["head"]

    def cache_weights(self, masters: PackedMasters) -> None:
        """From the masters of all ranks, until `drop_weights`."""
        if self._values:
            return
        for index, layer in enumerate(self.packed_layers()):
            prefix = f"layers.{index}."
            own = {name: masters.own(prefix + name) for name in layer_stacks(self.arch, index)}
            parts = {name: masters.parts(prefix + name) for name in own}
            stacks = masters.gathered({prefix + name: each for name, each in layer.made(own, parts).items()})
            layer.cache({name.removeprefix(prefix): each for name, each in stacks.items()})
        # A GPU with all rows looks tokens up in the masters, and needs no narrow copy beside them.
        outer = {"norm": (to_bf16(masters.own("norm")),), "embedding": (masters.looked_up("embedding"),)}
        if self.head is not None:
            outer["head"] = (masters.own("head").bfloat16(),)
        self._values = {name: values for name, (values,) in masters.gathered(outer).items()}
        if self.head is None:
            self._values["head"] = self._values["embedding"].bfloat16()

    def cache_engine_weights(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """From a policy that was exported in these blocks' formats, until `drop_weights`."""

        def joined(stack: Stack, suffix: str) -> Tensor:
            parts = [tensors[name + suffix].to(device) for name, _ in stack.parts]
            # torch joins bytes, and not codes.
            bits = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
            return torch.cat(bits).view(parts[0].dtype)

        for index, layer in enumerate(self.packed_layers()):
            stacks = dict[str, Sequence[Tensor]]()
            for name, stack in layer_stacks(self.arch, index).items():
                has_codes = stack.parts[0][0] + SCALE_SUFFIX in tensors
                values = joined(stack, "")
                narrow = [values] if name in LINEARS else [to_bf16(values)]
                stacks[name] = [values, joined(stack, SCALE_SUFFIX)] if has_codes else narrow
            layer.cache(stacks)
        outer = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
        # Views would hold the memory of all that was shipped beside them.
        self._values = {name: tensors[key].to(device, copy=True) for name, key in outer.items() if key in tensors}
        self._values["norm"] = to_bf16(self._values["norm"])
        self._values.setdefault("head", self._values["embedding"])

    def drop_weights(self) -> None:
        self._values = {}
        for layer in self.packed_layers():
            layer.drop_weights()

    def forward(
        self,
        tokens: Tensor,
        pack: AttentionPack,
        attention: PackedAttention,
        scales: Scales,
        observe: Observer | None = None,
        losses: RouterLosses | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, BF16 [tokens, hidden], of int64 [tokens]."""
        context = LayerContext(pack, attention, self._cos, self._sin, scales, observe, losses)
        x: Tensor = _Lookup.apply(self.embedding, self._values["embedding"], tokens)  # type: ignore[no-untyped-call]
        delta: Tensor | None = None
        run = self._with_gradients if torch.is_grad_enabled() else PackedLayer.forward
        for layer in self.packed_layers():
            x, delta = run(layer, x, delta, context)
        return norm_only(x, delta, Norm(_pass_gradient(self.norm, self._values["norm"]), self.arch.rms_norm_eps))

    def _with_gradients(
        self, layer: PackedLayer, x: Tensor, delta: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        total, more = _Layer.apply(x, delta, self._run, layer, context, *layer.parameters())  # type: ignore[no-untyped-call]
        return total, more

    def packed_layers(self) -> Iterator[PackedLayer]:
        for layer in self.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


def _forms(arch: Architecture) -> Iterator[type[PackedLayer]]:
    for index in range(arch.num_layers):
        yield SparseLayer if index in arch.sparse_layers else PackedLayer


class _PassGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _pass_gradient(collector: Tensor, values: Tensor) -> Tensor:
    result: Tensor = _PassGradient.apply(collector, values)  # type: ignore[no-untyped-call]
    return result


class _Lookup(torch.autograd.Function):
    """Rows of the embedding in BF16, whose gradients are added in FP32."""

    @staticmethod
    def forward(ctx: Any, collector: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(values)
        return nn.functional.embedding(tokens, values).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.rows, -1, False), None, None
