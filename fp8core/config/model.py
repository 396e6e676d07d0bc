"""Settings of a model that has no checkpoint yet: its shape, and its supervised start."""

from pydantic import Field, model_validator

from fp8core.config.section import Section, UserSource


class ArchitectureConfig(Section):
    """A decoder built from scratch; real checkpoints bring their own config.json."""

    family: str = Field("qwen3", description="Its kind of layers: a file in fp8core/models/families.")
    hidden_size: int = Field(128, ge=8, le=16384, description="Width of the residual stream.")
    intermediate_size: int = Field(256, ge=8, le=65536, description="Width of a dense MLP.")
    num_layers: int = Field(2, ge=1, le=200, description="Transformer layers.")
    num_heads: int = Field(4, ge=1, le=256, description="Query heads.")
    num_kv_heads: int = Field(2, ge=1, le=256, description="Key and value heads; divides num_heads.")
    head_dim: int = Field(32, ge=2, le=512, multiple_of=2, description="Width of an attention head.")
    tie_embeddings: bool = Field(False, description="The head reuses the embedding.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary embedding.")
    max_positions: int = Field(256, ge=8, le=1 << 20, description="Longest prompt with its completion, in tokens.")
    num_experts: int = Field(0, ge=0, le=4096, description="Experts of a sparse layer; 0 of a dense family.")
    experts_per_token: int = Field(2, ge=1, le=4096, description="Experts a token goes to.")
    expert_intermediate_size: int = Field(128, ge=8, le=65536, description="Width of one expert.")
    normalise_top_k: bool = Field(True, description="The weights of a token's experts sum to 1 (norm_topk_prob).")
    decoder_sparse_step: int = Field(1, ge=1, le=200, description="Every n-th layer has experts.")
    mlp_only_layers: list[int] = Field(default_factory=list, description="Layers that are dense all the same.")

    @model_validator(mode="after")
    def _sizes_agree(self) -> "ArchitectureConfig":
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return self


class WarmStartConfig(Section):
    """Supervised warm start before GRPO, on demonstrations of the chain task or of your own."""

    demonstrations: UserSource | None = Field(None, min_length=1, description="A .jsonl file; null: the chain task's.")
    completion_field: str = Field("completion", min_length=1, description="Field of the demonstrated completion.")
    steps: int = Field(600, ge=1, le=1_000_000, description="Supervised updates before step 0.")
    batch_size: int = Field(128, ge=1, le=65536, description="Demonstrations of one update.")
    learning_rate: float = Field(2e-3, gt=0, le=1, description="A checkpoint takes about 1e-5.")
    step_by_step_share: float = Field(0.4, ge=0, le=1, description="Share of demonstrations that show all steps.")
    tool_share: float = Field(0, ge=0, le=1, description="Share that calls environment.name=calculator.")
