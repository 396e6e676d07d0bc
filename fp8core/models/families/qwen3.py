"""Qwen3, dense (arXiv 2505.09388): every head of Q and K is normed."""

from fp8core.models.families.family import Family, LayerParts, qwen_config

FAMILY = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    layer=LayerParts(qk_norm="head"),
    aligned_class="AlignedQwen3ForCausalLM",
    config=qwen_config,
)
