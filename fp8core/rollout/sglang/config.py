"""The section `rollout.sglang`: it decides speed and memory, and formats belong to the precision contract."""

from typing import Annotated, Literal

from pydantic import Field

from fp8core.config.section import SAME_SPEED, Section


class SglangConfig(Section):
    """Settings of SGLang; `rollout.max_batch` is its max_running_requests."""

    model: Literal["stock", "aligned"] = Field(
        "stock",
        description="stock runs SGLang's own model; aligned runs ours, as rollout.vllm.model, with pages of a multiple "
        "of 16 tokens.",
    )
    mem_fraction_static: Annotated[float, SAME_SPEED] = Field(
        0.8, gt=0, le=0.98, description="Share of the device's memory for weights and KV cache; graphs come on top."
    )
    kv_cache_gib: Annotated[float | None, SAME_SPEED] = Field(
        None, gt=0, le=4096, description="Size of the KV cache; null takes what mem_fraction_static leaves."
    )
    context_length: Annotated[int | None, SAME_SPEED] = Field(
        None, ge=8, le=1 << 20, description="Longest prompt with its completion; null takes the model's positions."
    )
    chunked_prefill_size: int = Field(
        8192, ge=256, le=1 << 17, description="Tokens of prompts that one step of the engine reads."
    )
    page_size: int = Field(1, ge=1, le=1024, description="Tokens of a cache page, the unit of prefix caching.")
    graphs: bool = Field(True, description="CUDA graphs of decode steps; false runs eagerly.")
    batch_invariant: bool = Field(
        False,
        description="SGLang's deterministic inference: operations whose results do not depend on the batch, where it "
        "has them.",
    )
    sleep: bool = Field(
        False, description="Give weights, cache and graphs back to the device between rollout and sync."
    )
