"""Llama 2 and 3 (arXiv 2407.21783), and what shares its class: SmolLM2, TinyLlama."""

from fp8core.models.families.family import Family, LayerParts

FAMILY = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    layer=LayerParts(),
    aligned_class="AlignedLlamaForCausalLM",
    config=lambda arch: {"mlp_bias": False},
)
