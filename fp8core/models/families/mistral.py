"""Mistral (arXiv 2310.06825) without its window, which makes it a Llama of another name."""

from fp8core.models.families.family import Family, LayerParts, no_window

FAMILY = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    layer=LayerParts(),
    aligned_class="AlignedLlamaForCausalLM",
    unsupported=no_window,
    # An absent key means a window of 4096 tokens to its class.
    config=lambda arch: {"sliding_window": None},
)
