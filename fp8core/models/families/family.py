"""A family of decoders: the parts of its layers, the paths that compute it, its keys of config.json, its weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fp8core.models.architecture import Architecture, Experts

Path = Literal["packed", "megatron", "vllm", "sglang", "aligned"]
"""A path beside the exact one (embedded engine and exact trainer), which computes every family."""
EVERY_PATH: frozenset[Path] = frozenset({"packed", "megatron", "vllm", "sglang", "aligned"})
Finding = tuple[str, object, str]
"""A key of a config.json, its value, and what is supported."""
Shapes = dict[str, tuple[int, ...]]

# The settings that choose each path.
_TRAINERS = {
    "exact": "training.device=cpu with training.packed=false",
    "packed": "training.packed=true",
    "megatron": "training.trainer=megatron",
}
_ENGINES = {
    "exact": "rollout.engine=embedded",
    "vllm": "rollout.engine=vllm with rollout.vllm.model=stock",
    "sglang": "rollout.engine=sglang with rollout.sglang.model=stock",
}


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parts of a layer beside its linears and full attention with rotary positions.

    Attributes:
        norms: RMSNorms of the input of attention and of the MLP (`before`), or of their outputs (`after`).
        attention_norm, mlp_norm: names of the weights of these two norms.
        qk_norm: what an RMSNorm of Q and K takes the mean over: one head, or all heads of the projection.
        qkv_bias: a bias is added to Q, K and V.
    """

    norms: Literal["before", "after"] = "before"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qk_norm: Literal["head", "projection"] | None = None
    qkv_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """Decoders that one class of transformers loads.

    Attributes:
        name: `model_type` of config.json.
        hf_class: `architectures` of config.json.
        paths: what else computes it.
        aligned_class: the aligned model of vLLM and SGLang, which both define under this name.
        heads_fill_hidden: its class has no `head_dim` of its own; all heads together are as wide as the hidden size.
        experts: from a config as transformers reads it; None: no layer has experts.
        unsupported: keys of such a config that stand for a computation which we lack.
        config: keys of config.json that only this class has.
    """

    name: str
    hf_class: str
    layer: LayerParts
    paths: frozenset[Path] = EVERY_PATH
    aligned_class: str | None = None
    heads_fill_hidden: bool = False
    experts: Callable[[Any], Experts] | None = None
    unsupported: Callable[[Any], Iterator[Finding]] = lambda hf: iter(())
    config: Callable[[Architecture], dict[str, Any]] = lambda arch: {}

    @property
    def title(self) -> str:
        return self.hf_class.removesuffix("ForCausalLM")

    def refusals(self, path: Path, place: str) -> Iterator[str]:
        """A message if `path` does not compute it; it begins with `place`, the setting that chose the path."""
        if path not in self.paths:
            choices = _TRAINERS if path in _TRAINERS else _ENGINES
            others = [setting for other, setting in choices.items() if other in ("exact", *self.paths)]
            yield f"{place}: it computes no {self.title}; set {' or '.join(others)}"

    def parameter_shapes(self, arch: Architecture) -> Shapes:
        """Name and shape of every parameter, in the Hugging Face layout (`out x in` for linears)."""
        shapes: Shapes = {"model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
        for i in range(arch.num_layers):
            prefix = f"model.layers.{i}"
            norm = (arch.hidden_size,)
            shapes[f"{prefix}.{self.layer.attention_norm}.weight"] = norm
            shapes |= self._attention_shapes(f"{prefix}.self_attn", arch)
            shapes[f"{prefix}.{self.layer.mlp_norm}.weight"] = norm
            if arch.experts is not None and i in arch.sparse_layers:
                shapes |= _expert_shapes(f"{prefix}.mlp", arch.hidden_size, arch.experts)
            else:
                shapes |= _mlp_shapes(f"{prefix}.mlp", arch.hidden_size, arch.intermediate_size)
        shapes["model.norm.weight"] = (arch.hidden_size,)
        if not arch.tie_embeddings:
            shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden_size)
        return shapes

    def _attention_shapes(self, prefix: str, arch: Architecture) -> Shapes:
        query = arch.num_heads * arch.head_dim
        key = arch.num_kv_heads * arch.head_dim
        sizes = {"q": query, "k": key, "v": key}
        shapes: Shapes = {f"{prefix}.{name}_proj.weight": (size, arch.hidden_size) for name, size in sizes.items()}
        if self.layer.qkv_bias:
            shapes |= {f"{prefix}.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if self.layer.qk_norm is not None:
            for name in "qk":
                width = arch.head_dim if self.layer.qk_norm == "head" else sizes[name]
                shapes[f"{prefix}.{name}_norm.weight"] = (width,)
        return shapes | {f"{prefix}.o_proj.weight": (arch.hidden_size, query)}


def no_window(hf: Any) -> Iterator[Finding]:
    """Refuse a window in a class that reads `sliding_window` alone; other classes name it in `layer_types`."""
    if hf.sliding_window is not None:
        yield "sliding_window", hf.sliding_window, "supported: null (full attention)"


def qwen_config(arch: Architecture) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": arch.num_layers}


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _expert_shapes(prefix: str, hidden: int, experts: Experts) -> Shapes:
    shapes: Shapes = {f"{prefix}.gate.weight": (experts.count, hidden)}
    for e in range(experts.count):
        shapes |= _mlp_shapes(f"{prefix}.experts.{e}", hidden, experts.intermediate_size)
    return shapes
