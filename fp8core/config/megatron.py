"""Settings of the Megatron trainer that decide how a model is spread and what is kept in memory; formats belong to the
precision contract."""

from typing import Literal

from pydantic import Field, model_validator

from fp8core.config.section import Section


class MegatronConfig(Section):
    """Training by Megatron Core on `cluster.ranks` GPUs. Copies of the model are data parallel."""

    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share every linear layer.")
    pipeline_parallel: int = Field(1, ge=1, le=64, description="GPUs that share the layers, in equal runs.")
    expert_parallel: int = Field(1, ge=1, le=256, description="GPUs that share the experts of a layer.")
    sequence_parallel: bool = Field(
        False, description="Norms and the residual stream are shared as well; needs tensor_parallel above 1."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="What the backward pass computes again instead of keeping it: nothing, attention, or all layers.",
    )
    distributed_optimizer: bool = Field(
        True, description="Share FP32 masters and moments out among the data-parallel GPUs (ZeRO stage 1)."
    )
    micro_batch_tokens: int = Field(
        8192,
        ge=128,
        le=1 << 22,
        multiple_of=128,
        description="Tokens of one forward and backward pass; sequences are packed one after another without padding.",
    )

    @model_validator(mode="after")
    def _sequence_parallel_needs_a_group(self) -> "MegatronConfig":
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel=true needs tensor_parallel above 1")
        return self
