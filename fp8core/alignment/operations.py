"""A decoder cut into the operations that vLLM has as modules, to be compared with an engine one by one.

An operation turns some of the named values of a forward into others. The values of one sequence are FP32 [tokens, n]:

| value            | of                                                               |
|------------------|------------------------------------------------------------------|
| residual         | the residual stream, before a block's output is added            |
| delta            | the output of the last block (at first the embedding)            |
| normed           | input of qkv, of gate_up, and of the head                        |
| q, k, v          | heads side by side; with norm and rotary positions from there on |
| attended         | output of attention                                              |
| gate_up, activated | between the linears of a dense SwiGLU block                  |
| logits           | FP32 [tokens, vocabulary]                                        |

A router with its experts is one operation, from normed to delta. Run in order the operations are `models.decoder` bit
for bit. An engine's values after each operation (a trace) are compared in three ways (`compare`):

    accumulated   the chain from the tokens against the engine's values: what has come together up to there
    local         each operation on the engine's own inputs: its own error, nothing inherited
    remaining     the chain goes on from the engine's values: what log-prob error is still to come after that point

Inputs of quantisers are also compared by their E4M3 codes. A last bit of BF16 that flips a code weighs a thousand times
more than one that does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.experts import MlpWeights, TopKRouting, feed_forward
from fp8core.models.weights import Formats, LayerWeights, PolicyWeights
from fp8core.numerics.attention import FP8_CACHE_FORMS
from fp8core.numerics.e4m3 import quantise_rows
from fp8core.numerics.elementwise import rms_norm, rotate, swiglu, to_e4m3_grid
from fp8core.numerics.gemm import relative_rms
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.linear import LinearFormat, LinearWeight, dequantise_rows
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.recipe import Grouping

Values = dict[str, Tensor]
Compute = Callable[[Values], tuple[Tensor, ...]]
QuantiseValues = Callable[[Tensor], Tensor]
EMBEDDING, FINAL_NORM, LOGITS = "model.embed_tokens", "model.norm", "logits"


@dataclass(frozen=True)
class Operation:
    """One step of a forward.

    Attributes:
        name: of vLLM's module (`model.layers.0.mlp.act_fn`).
        reads: values it needs.
        writes: values it makes, in the order of the module's outputs.
        compute: from (at least) what it reads to what it writes.
        codes: by value, how what reads it quantises it; absent where nothing does.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compute: Compute
    codes: Mapping[str, QuantiseValues]

    def after(self, values: Values) -> Values:
        return values | dict(zip(self.writes, self.compute(values), strict=True))


@dataclass(frozen=True)
class OperationError:
    """Distance of an engine from the reference at one operation.

    Attributes:
        operation: its name.
        value: the value it wrote.
        local_rms: relative RMS error of the operation alone.
        accumulated_rms: the same of the chain from the tokens.
        local_differing: share of elements that the operation alone makes differently.
        local_codes: share of E4M3 codes (or their scales) that differ by it; None where nothing quantises the value.
        accumulated_codes: the same of the chain from the tokens.
    """

    operation: str
    value: str
    local_rms: float
    accumulated_rms: float
    local_differing: float
    local_codes: float | None
    accumulated_codes: float | None


def operations(
    arch: Architecture, formats: Formats, weights: PolicyWeights, tokens: Tensor, scales: Sequence[LayerScales]
) -> list[Operation]:
    """Every operation of a forward over one sequence, in order.

    `tokens` are int64 [T]; `scales` are of Q, K and V per layer, required by FP8 attention.
    """
    parts = _Parts(Decoder(arch, formats), weights, len(tokens))

    def embed(values: Values) -> tuple[Tensor, ...]:
        return (torch.nn.functional.embedding(tokens, weights.embedding),)

    def logits(values: Values) -> tuple[Tensor, ...]:
        return (formats.head.logits(values["normed"], weights.head),)

    chain = [Operation(EMBEDDING, (), ("delta",), embed, {})]
    for i in range(arch.num_layers):
        chain += parts.layer(i, scales[i] if scales else None)
    norm = parts.norm(weights.norm, first=False)
    chain.append(Operation(FINAL_NORM, ("residual", "delta"), ("normed", "residual"), norm, {}))
    return [*chain, Operation(LOGITS, ("normed",), ("logits",), logits, {})]


@dataclass(frozen=True)
class _Parts:
    decoder: Decoder
    weights: PolicyWeights
    length: int

    def layer(self, i: int, scales: LayerScales | None) -> list[Operation]:
        form, layer, prefix = self.decoder.formats.layers[i], self.weights.layers[i], f"model.layers.{i}"
        groups, first = self.decoder.formats.recipe.activations, ("delta",) if i == 0 else ("residual", "delta")
        qkv, gate_up = _row_codes("normed", form.qkv, groups), _row_codes("normed", form.gate_up, groups)
        attended = _row_codes("attended", form.output, groups)
        cached = scales if form.attention.name in FP8_CACHE_FORMS else None
        rotated = _cache_codes(cached, "qk" if form.attention.name == "fp8" else "k")
        heads, normed = ("q", "k", "v"), ("normed", "residual")
        output = _linear(form.output, layer.output, "attended")
        input_norm, post_norm = self.norm(layer.input_norm, first=i == 0), self.norm(layer.post_norm, first=False)
        found = [
            (f"{prefix}.input_layernorm", first, normed, input_norm, qkv),
            (f"{prefix}.self_attn.qkv_proj", ("normed",), heads, self.qkv(i, layer), _cache_codes(cached, "v")),
            *self.head_norms(f"{prefix}.self_attn", layer),
            (f"{prefix}.self_attn.rotary_emb", ("q", "k"), ("q", "k"), self.rotary(), rotated),
            (f"{prefix}.self_attn.attn", heads, ("attended",), self.attention(i, scales), attended),
            (f"{prefix}.self_attn.o_proj", ("attended",), ("delta",), output, {}),
            (f"{prefix}.post_attention_layernorm", ("residual", "delta"), normed, post_norm, gate_up),
            *self.block(i, f"{prefix}.mlp", layer),
        ]
        return [Operation(*fields) for fields in found]

    def block(self, i: int, prefix: str, layer: LayerWeights) -> list[tuple[Any, ...]]:
        """A dense block by its linears; a router with its experts as a whole, since experts have no single input."""
        form, mlp, groups = self.decoder.formats.layers[i], layer.mlp, self.decoder.formats.recipe.activations
        if isinstance(mlp, MlpWeights):
            gated, down = _linear(form.gate_up, mlp.gate_up, "normed"), _linear(form.down, mlp.down, "activated")
            codes = _row_codes("activated", form.down, groups)
            return [
                (f"{prefix}.gate_up_proj", ("normed",), ("gate_up",), gated, {}),
                (f"{prefix}.act_fn", ("gate_up",), ("activated",), self.swiglu, codes),
                (f"{prefix}.down_proj", ("activated",), ("delta",), down, {}),
            ]

        def experts(values: Values) -> tuple[Tensor, ...]:
            # A top-k choice does not depend on the layer.
            return (feed_forward(values["normed"], mlp, self.decoder.formats.mlp(i), 0, TopKRouting()),)

        return [(prefix, ("normed",), ("delta",), experts, {})]

    def norm(self, weight: Tensor, first: bool) -> Compute:
        """The first norm has nothing to add to."""
        formats, eps = self.decoder.formats, self.decoder.arch.rms_norm_eps
        points = formats.points

        def compute(values: Values) -> tuple[Tensor, ...]:
            total = values["delta"] if first else values["residual"] + values["delta"]
            normed = rms_norm(points.sums(total), weight, eps, formats.rounding, points.normalised)
            return normed, formats.rounding(total)

        return compute

    def qkv(self, i: int, layer: LayerWeights) -> Compute:
        arch = self.decoder.arch
        sizes = [heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
        return lambda values: self.decoder.fused_qkv(i, layer, values["normed"]).split(sizes, dim=-1)

    def head_norms(self, prefix: str, layer: LayerWeights) -> list[tuple[Any, ...]]:
        if layer.q_norm is None or layer.k_norm is None:
            return []
        named = (("q", layer.q_norm), ("k", layer.k_norm))
        return [(f"{prefix}.{n}_norm", (n,), (n,), self.head_norm(n, w), {}) for n, w in named]

    def head_norm(self, name: str, weight: Tensor) -> Compute:
        formats, eps = self.decoder.formats, self.decoder.arch.rms_norm_eps

        def compute(values: Values) -> tuple[Tensor, ...]:
            heads = values[name].view(self.length, -1, len(weight))
            return (rms_norm(heads, weight, eps, formats.rounding, formats.points.normalised).flatten(1),)

        return compute

    def rotary(self) -> Compute:
        cos, sin = self.decoder.rotary_tables(torch.arange(self.length)[None])
        rounding = self.decoder.formats.rounding

        def compute(values: Values) -> tuple[Tensor, ...]:
            return tuple(_flat(rotate(self.heads(values[n]), cos, sin, rounding)) for n in ("q", "k"))

        return compute

    def attention(self, i: int, scales: LayerScales | None) -> Compute:
        form = self.decoder.formats.layers[i].attention
        mask = FullContext.of(torch.ones(1, self.length, dtype=torch.bool)).mask

        def compute(values: Values) -> tuple[Tensor, ...]:
            q, k, v = (self.heads(values[n]) for n in ("q", "k", "v"))
            return (_flat(form.attend(q, *form.store(k, v, scales), mask, scales)),)

        return compute

    def swiglu(self, values: Values) -> tuple[Tensor, ...]:
        formats = self.decoder.formats
        gate, up = values["gate_up"].chunk(2, dim=-1)
        return (swiglu(gate, up, formats.rounding, formats.points.activated),)

    def heads(self, x: Tensor) -> Tensor:
        """[T, heads * d] as [1, heads, T, d]."""
        return x.view(1, self.length, -1, self.decoder.arch.head_dim).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[1, heads, T, d] as [T, heads * d]."""
    return x.transpose(1, 2).flatten(2)[0]


def _linear(form: LinearFormat, weight: LinearWeight, name: str) -> Compute:
    return lambda values: (form(values[name], weight),)


def _row_codes(name: str, form: LinearFormat, groups: Grouping) -> dict[str, QuantiseValues]:
    """Codes times scales, as a linear of this format reads the value."""
    if form.name != "fp8_block":
        return {}
    return {name: lambda x: dequantise_rows(*quantise_rows(x, groups), groups)}


def _cache_codes(scales: LayerScales | None, names: str) -> dict[str, QuantiseValues]:
    if scales is None:
        return {}
    factors = {name: getattr(scales, name) for name in names}
    return {name: partial(to_e4m3_grid, scale=factor) for name, factor in factors.items()}


def trace(chain: Sequence[Operation]) -> list[Values]:
    values: Values = {}
    found = []
    for operation in chain:
        values = operation.after(values)
        found.append(values)
    return found


def compare(chain: Sequence[Operation], engine: Sequence[Values]) -> list[OperationError]:
    """Own and accumulated error of every operation, against an engine's values after each."""
    own: Values = {}
    before: Values = {}
    errors = []
    for operation, after in zip(chain, engine, strict=True):
        own, alone = operation.after(own), operation.after(before)
        errors += [_error(operation, value, own, alone, after) for value in operation.writes if value != "residual"]
        before = after
    return errors


def remaining(chain: Sequence[Operation], engine: Sequence[Values], targets: Tensor, temperature: float) -> Tensor:
    """Log-probs when the chain goes on from the engine's values after each operation, of the last n tokens, `targets`.

    FP32 [operations + 1, n]: first those of the chain from the tokens, last those of the engine. Targets are int64
    [n].
    """
    starts: list[Values] = [{}, *engine]
    rows = []
    for done, values in enumerate(starts):
        for operation in chain[done:]:
            values = operation.after(values)
        rows.append(logprobs_of(values["logits"], targets, temperature))
    return torch.stack(rows)


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """FP32 [n] log-probs of the last n tokens of a sequence, from the logits [tokens, vocabulary] of all of it."""
    scored = log_softmax(logits[-len(targets) - 1 : -1], temperature)
    return scored.gather(-1, targets[:, None]).squeeze(-1).float()


def _error(operation: Operation, value: str, own: Values, alone: Values, engine: Values) -> OperationError:
    codes, theirs = operation.codes.get(value), engine[value]
    return OperationError(
        operation=operation.name,
        value=value,
        local_rms=relative_rms(theirs, alone[value]),
        accumulated_rms=relative_rms(theirs, own[value]),
        local_differing=_share(theirs, alone[value]),
        local_codes=_share(codes(theirs), codes(alone[value])) if codes else None,
        accumulated_codes=_share(codes(theirs), codes(own[value])) if codes else None,
    )


def _share(x: Tensor, y: Tensor) -> float:
    return (x != y).double().mean().item()
