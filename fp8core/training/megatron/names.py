"""Which parameters of Megatron Core's GPT hold which of the Hugging Face layout, and how each GPU's are cut.

| Megatron                   | Hugging Face           | joined by           | cut over tensor parallel |
|----------------------------|------------------------|---------------------|--------------------------|
| embedding, output_layer    | embed_tokens, lm_head  | padding of the rows | rows                     |
| self_attention.linear_qkv  | q_proj, k_proj, v_proj | turn by KV group    | rows                     |
| self_attention.linear_proj | o_proj                 | -                   | columns                  |
| mlp.linear_fc1             | gate_proj, up_proj     | one after the other | rows, of each            |
| mlp.linear_fc2             | down_proj              | -                   | columns                  |
| norms, router              | norms, gate            | -                   | not                      |

Transformer Engine's layers hold the norm before a linear in that linear, and all experts of a GPU in one module; those
of Megatron itself hold them apart (`Style`). Experts are cut over expert parallel alone, layers over pipeline parallel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fp8core.config.megatron import MegatronConfig
from fp8core.models.architecture import Architecture

Join = Literal["copy", "rows_padded", "by_kv_group", "one_after_another"]
Cut = Literal["no", "rows", "columns", "rows_of_each"]


@dataclass(frozen=True)
class Style:
    """Whose layers hold the parameters."""

    norms_in_linears: bool
    experts_together: bool


TRANSFORMER_ENGINE = Style(norms_in_linears=True, experts_together=True)
LOCAL = Style(norms_in_linears=False, experts_together=False)


@dataclass(frozen=True)
class Parameter:
    """A parameter of one GPU's model: its name there, the Hugging Face parameters it holds, and how."""

    name: str
    sources: tuple[str, ...]
    join: Join = "copy"
    cut: Cut = "no"


@dataclass(frozen=True, order=True)
class Place:
    """Where a GPU stands in the grid."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0


def places(megatron: MegatronConfig) -> list[Place]:
    """Every place that holds something different, in order."""
    return [
        Place(tensor, pipeline, expert)
        for tensor in range(megatron.tensor_parallel)
        for pipeline in range(megatron.pipeline_parallel)
        for expert in range(megatron.expert_parallel)
    ]


def layers_of(arch: Architecture, megatron: MegatronConfig, pipeline: int) -> range:
    """Layers of a pipeline stage."""
    count = arch.num_layers // megatron.pipeline_parallel
    return range(pipeline * count, (pipeline + 1) * count)


def parameters(arch: Architecture, megatron: MegatronConfig, style: Style, place: Place) -> Iterator[Parameter]:
    """All parameters of one GPU's model."""
    first, last = place.pipeline == 0, place.pipeline == megatron.pipeline_parallel - 1
    embedding = "model.embed_tokens.weight"
    if first:
        yield Parameter("embedding.word_embeddings.weight", (embedding,), "rows_padded", "rows")
    for local, layer in enumerate(layers_of(arch, megatron, place.pipeline)):
        yield from _attention(arch, style, f"decoder.layers.{local}", f"model.layers.{layer}")
        if arch.experts is not None and layer in arch.sparse_layers:
            count = arch.experts.count // megatron.expert_parallel
            held = range(place.expert * count, (place.expert + 1) * count)
            yield from _experts(style, held, f"decoder.layers.{local}", f"model.layers.{layer}")
        else:
            yield from _mlp(style, f"decoder.layers.{local}", f"model.layers.{layer}")
    if last:
        yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",))
        if not arch.tie_embeddings:
            yield Parameter("output_layer.weight", ("lm_head.weight",), "rows_padded", "rows")
        elif not first:
            yield Parameter("output_layer.weight", (embedding,), "rows_padded", "rows")


def _attention(arch: Architecture, style: Style, into: str, source: str) -> Iterator[Parameter]:
    linear, projections = f"{into}.self_attention.linear_qkv", f"{source}.self_attn"
    norm = f"{linear}.layer_norm_weight" if style.norms_in_linears else f"{into}.input_layernorm.weight"
    yield Parameter(norm, (f"{source}.input_layernorm.weight",))
    qkv = tuple(f"{projections}.{name}_proj.weight" for name in "qkv")
    yield Parameter(f"{linear}.weight", qkv, "by_kv_group", "rows")
    if arch.qk_norm:
        for name in "qk":
            yield Parameter(f"{into}.self_attention.{name}_layernorm.weight", (f"{projections}.{name}_norm.weight",))
    yield Parameter(f"{into}.self_attention.linear_proj.weight", (f"{projections}.o_proj.weight",), cut="columns")


def _mlp(style: Style, into: str, source: str) -> Iterator[Parameter]:
    fc1 = f"{into}.mlp.linear_fc1"
    norm = f"{fc1}.layer_norm_weight" if style.norms_in_linears else f"{into}.pre_mlp_layernorm.weight"
    yield Parameter(norm, (f"{source}.post_attention_layernorm.weight",))
    yield Parameter(f"{fc1}.weight", _gate_up(f"{source}.mlp"), "one_after_another", "rows_of_each")
    yield Parameter(f"{into}.mlp.linear_fc2.weight", (f"{source}.mlp.down_proj.weight",), cut="columns")


def _experts(style: Style, held: range, into: str, source: str) -> Iterator[Parameter]:
    # The router reads the normed states too, so that this norm is in no linear.
    yield Parameter(f"{into}.pre_mlp_layernorm.weight", (f"{source}.post_attention_layernorm.weight",))
    yield Parameter(f"{into}.mlp.router.weight", (f"{source}.mlp.gate.weight",))
    for local, expert in enumerate(held):
        fc1, fc2 = (
            _expert_name(style, f"{into}.mlp.experts", linear, local) for linear in ("linear_fc1", "linear_fc2")
        )
        yield Parameter(fc1, _gate_up(f"{source}.mlp.experts.{expert}"), "one_after_another")
        yield Parameter(fc2, (f"{source}.mlp.experts.{expert}.down_proj.weight",))


def _expert_name(style: Style, prefix: str, linear: str, expert: int) -> str:
    if style.experts_together:
        return f"{prefix}.{linear}.weight{expert}"
    return f"{prefix}.local_experts.{expert}.{linear}.weight"


def _gate_up(prefix: str) -> tuple[str, str]:
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"
