"""Settings of the shipped engines: speed and memory; formats belong to the precision contract."""

from typing import Literal

from pydantic import Field

from fp8core.config.section import Section


class SpeculationConfig(Section):
    """Drafts that the engine checks several tokens at a time; no token changes (docs/guides/speculation.md)."""

    source: Literal["none", "suffix"] = Field(
        "none", description="Of drafts; suffix: what mostly followed in the prompt, its group and earlier completions."
    )
    max_tokens: int = Field(8, ge=1, le=64, description="Longest draft, in tokens; each is as long as pays.")

    @property
    def draft_tokens(self) -> int:
        """Tokens of the longest draft; 0 where there are none."""
        return 0 if self.source == "none" else self.max_tokens


class VllmConfig(Section):
    """Settings of vLLM; `rollout.max_batch` is its max_num_seqs."""

    model: Literal["stock", "aligned"] = Field(
        "stock", description="stock: vLLM's own; aligned: ours, with the log-probs of training (docs/guides/vllm.md)."
    )
    gpu_memory_utilization: float = Field(0.85, gt=0, le=0.98, description="Share of the GPU's memory.")
    kv_cache_gib: float | None = Field(
        None, gt=0, le=4096, description="Size of the KV cache; null takes what gpu_memory_utilization leaves."
    )
    max_model_len: int | None = Field(None, ge=8, le=1 << 20, description="Longest row; null: the model's positions.")
    batched_tokens: int = Field(8192, ge=256, le=1 << 17, description="Tokens of one step of the engine.")
    graphs: bool = Field(True, description="CUDA graphs, and torch.compile of the stock model.")
    captured_tokens: int | None = Field(
        None,
        ge=0,
        le=1 << 17,
        description="Aligned model: steps with prompts of up to this many tokens are CUDA graphs; null chooses.",
    )
    batch_invariant: bool = Field(False, description="Results that do not depend on the batch, where vLLM can do that.")
    sleep: bool = Field(False, description="Free weights and cache between rollout and sync.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share an engine; needs placement=separate.")


class SglangConfig(Section):
    """Settings of SGLang; `rollout.max_batch` is its max_running_requests."""

    model: Literal["stock", "aligned"] = Field(
        "stock", description="stock: SGLang's own model; aligned: ours, with pages of a multiple of 16 tokens."
    )
    mem_fraction_static: float = Field(0.8, gt=0, le=0.98, description="Share of the GPU's memory, without graphs.")
    kv_cache_gib: float | None = Field(
        None, gt=0, le=4096, description="Size of the KV cache; null takes what mem_fraction_static leaves."
    )
    context_length: int | None = Field(None, ge=8, le=1 << 20, description="Longest row; null: the model's positions.")
    chunked_prefill_size: int = Field(8192, ge=256, le=1 << 17, description="Prompt tokens of one step.")
    page_size: int = Field(1, ge=1, le=1024, description="Tokens of a cache page, the unit of prefix caching.")
    graphs: bool = Field(True, description="CUDA graphs of decode steps; false runs eagerly.")
    sleep: bool = Field(False, description="Free weights, cache and graphs between rollout and sync.")
