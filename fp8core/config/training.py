"""The settings of an update: trainers and optimisers, adapters, which completions count, and the correction."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from fp8core.config.section import Section, choice_of
from fp8core.config.shipped import OPTIMISERS

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Adapters of linears that learn instead of the whole model. Engines get the merged weights."""

    rank: int = Field(16, ge=1, le=1024, description="Inner width of an adapter.")
    alpha: float = Field(32.0, gt=0, le=65536, description="An adapter's product is multiplied by alpha / rank.")
    targets: list[LoraTarget] = Field(
        default_factory=lambda: list(get_args(LoraTarget)),
        min_length=1,
        description="Linears of every layer that have an adapter; all else is frozen.",
    )


class MegatronConfig(Section):
    """Training by Megatron Core on `cluster.ranks` GPUs. Copies of the model are data parallel."""

    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share every linear layer.")
    expert_parallel: int = Field(1, ge=1, le=256, description="GPUs that share the experts of a layer.")
    sequence_parallel: bool = Field(
        False, description="Norms and the residual stream are shared as well; needs tensor_parallel above 1."
    )
    recompute: Literal["none", "full"] = Field("none", description="Recompute in the backward: nothing, or all layers.")
    micro_batch_tokens: int = Field(8192, ge=128, le=1 << 22, multiple_of=128, description="Tokens of one pass.")

    @model_validator(mode="after")
    def _sequence_parallel_needs_a_group(self) -> "MegatronConfig":
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel=true needs tensor_parallel above 1")
        return self


class ScheduleConfig(Section):
    """The learning rate after the warm-up, as a share of `training.learning_rate`."""

    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="How it falls to final_share.")
    final_share: float = Field(0.1, ge=0, le=1, description="Share that is left at the end, and later.")
    over_steps: int | None = Field(
        None, ge=1, le=10_000_000, description="GRPO steps until its end; null takes `steps` of the first start."
    )


class OptimiserConfig(Section):
    """The rule that updates weights by gradients; `training.learning_rate` is its rate."""

    name: Annotated[str, choice_of(OPTIMISERS, "OPTIMISER")] = Field(
        "adamw", description="adamw; muon, of matrices of layers and adapters, AdamW for the rest; or module:OPTIMISER."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of Muon's momentum.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled from the gradient.")
    state: Literal["fp32", "bf16"] = Field("fp32", description="Packed: format of moments.")


class TrainingConfig(Section):
    trainer: Literal["torch", "megatron"] = Field("torch", description="torch: exact on a CPU, packed on a GPU.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Of the torch trainer.")
    packed: bool | None = Field(None, description="Packed sequences; false: the exact trainer; null: on a GPU.")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Of the optimiser, at its highest.")
    warmup_steps: int = Field(5, ge=0, le=1_000_000, description="Linear learning-rate warm-up in optimiser updates.")
    learning_rate_schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    optimiser: OptimiserConfig = Field(default_factory=OptimiserConfig)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients of a larger norm are scaled down to it.")
    minibatches: int = Field(1, ge=1, le=1024, description="Optimiser updates of one pass over a rollout batch.")
    epochs: int = Field(1, ge=1, le=64, description="Passes over a rollout batch; later ones draw minibatches anew.")
    micro_batch: int = Field(256, ge=1, le=65536, description="Sequences of one pass that is not packed.")
    tokens_per_pass: int = Field(16384, ge=128, le=1 << 22, description="Tokens of one packed pass.")
    context_parallel: int = Field(
        1, ge=1, le=256, description="Packed: successive ranks of `cluster.ranks` that share each pass, by its tokens."
    )
    activation_checkpointing: bool = Field(False, description="Packed: recompute inside layers for the backward.")
    reduce_gradients: Literal["per_update", "per_pass"] = Field(
        "per_update", description="Packed ranks exchange gradients once an update (ZeRO 1), or in each pass (ZeRO 2)."
    )
    deterministic: bool = Field(True, description="On a GPU: only repeatable kernels, which replays need.")
    lora: LoraConfig | None = Field(None, description="Torch trainers: adapters learn; null trains all weights.")
    megatron: MegatronConfig = Field(default_factory=MegatronConfig, description="Of trainer=megatron.")

    @property
    def updates(self) -> int:
        """The most that a step makes."""
        return self.minibatches * self.epochs

    @property
    def computes_packed(self) -> bool:
        return self.device == "cuda" if self.packed is None else self.packed

    @model_validator(mode="after")
    def _settings_agree(self) -> "TrainingConfig":
        if self.lora is not None and self.trainer == "megatron":
            raise ValueError("lora with trainer=megatron, which has no adapters; set trainer to torch, or lora to null")
        if self.optimiser.name != "adamw" and self.trainer == "megatron":
            name = self.optimiser.name
            raise ValueError(f"optimiser.name={name} with trainer=megatron, which has AdamW alone; set it to adamw")
        if self.context_parallel > 1 and not (self.trainer == "torch" and self.computes_packed):
            ours = "trainer=megatron" if self.trainer == "megatron" else "the exact trainer"
            raise ValueError(
                f"context_parallel={self.context_parallel} with {ours}: packed passes of trainer=torch alone are "
                "shared; set it to 1, or packed to true"
            )
        if self.device == "cuda" and self.packed is False:
            raise ValueError("device=cuda with packed=false: the exact trainer computes on a CPU; set packed to null")
        self._check_narrow_moments()
        return self

    def _check_narrow_moments(self) -> None:
        settings = self.optimiser
        if settings.state == "fp32":
            return
        # One step changes the second moment by 1 - beta2 of itself; BF16 resolves 2^-8.
        if settings.beta2 > 0.99:
            raise ValueError(
                f"optimiser.beta2={settings.beta2}: a second moment in BF16 would not move; lower it to 0.99 or less"
            )
        # At 0.99 the first moment stops short of a steady gradient by a sixth.
        for name in ("beta1", "momentum"):
            if self.trainer == "torch" and self.computes_packed and (decay := getattr(settings, name)) > 0.95:
                raise ValueError(
                    f"optimiser.{name}={decay}: a first moment in BF16 stops too soon; lower it to 0.95 or less"
                )


class WeightingConfig(Section):
    """Importance weights (fp8core/rl/correction.py)."""

    level: Literal["none", "token", "sequence"] = Field(
        "token", description="What has one weight: each token, or each row by the product of its ratios."
    )
    action: Literal["keep", "truncate", "clip", "band", "mask"] = Field(
        "truncate", description="What happens outside the bounds (docs/reference/numerics.md)."
    )
    low: float = Field(0.0, ge=0, le=1e6, description="Lower bound of a weight.")
    high: float = Field(2.0, gt=0, le=1e6, description="Upper bound of a weight.")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "WeightingConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")
        return self


FilterName = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
]


class FilterConfig(Section):
    """A rejection filter (fp8core/rl/correction.py); bounds of k1 filters are on rho = old / rollout."""

    name: FilterName = Field(description="A statistic of a token or a row, and its divergence.")
    low: float = Field(0.0, ge=0, le=1e6, description="Of k1: least rho.")
    high: float = Field(gt=0, le=1e6, description="Of k1: largest rho; of k2 and k3: largest divergence.")

    @property
    def bounds_ratio(self) -> bool:
        return self.name.endswith("_k1")

    @model_validator(mode="after")
    def _bounds_fit_the_divergence(self) -> "FilterConfig":
        if self.bounds_ratio and not 0 < self.low <= self.high:
            raise ValueError(f"{self.name}: low={self.low}, high={self.high}: set low above 0, and not above high")
        if not self.bounds_ratio and self.low != 0:
            raise ValueError(f"{self.name}: low={self.low}: it takes an upper bound alone")
        return self


class CorrectionConfig(Section):
    """Correction of the mismatch between rollout and training policy."""

    method: Literal["none", "token_tis", "preset", "custom"] = Field(
        "token_tis", description="token_tis multiplies the clipped loss by min(exp(old - rollout), cap), detached."
    )
    cap: float = Field(2.0, ge=1, le=1000, description="Of token_tis.")
    preset: str | None = Field(None, description="Of preset: a name of fp8core/rl/presets.yaml, such as verl/geo_rs.")
    weighting: WeightingConfig = Field(default_factory=WeightingConfig, description="Of custom.")
    filters: list[FilterConfig] = Field(default_factory=list, description="Of custom: rejection filters.")
    veto: float | None = Field(None, gt=0, le=1, description="Of custom: a token below this ratio rejects its row.")
    normalise: Literal["none", "token"] = Field("none", description="Of custom: token weights average 1.")
    denominator: Literal["kept", "all"] | None = Field(
        None, description="Of custom: rejected tokens leave the loss's denominator (kept), or stay in it with weight 0."
    )
    mode: Literal["decoupled", "bypass"] = Field("decoupled", description="Of custom: bypass takes rollout for old.")

    @property
    def divides_by(self) -> Literal["kept", "all"]:
        return self.denominator or ("all" if self.mode == "bypass" else "kept")

    @property
    def rejects(self) -> bool:
        return bool(self.filters) or self.veto is not None or self.weighting.action == "mask"

    @property
    def weight_cap(self) -> float:
        """The bound of truncated token weights, for metrics of them; 2 where there is none."""
        truncates = self.weighting.level == "token" and self.weighting.action in ("truncate", "clip")
        return self.weighting.high if truncates and self.weighting.high >= 1 else 2.0

    @model_validator(mode="after")
    def _settings_are_read(self) -> "CorrectionConfig":
        if self.method == "preset" and self.preset is None:
            raise ValueError("method=preset needs the name of one: set correction.preset")
        if self.method != "preset" and self.preset is not None:
            raise ValueError(f"correction.preset={self.preset} needs correction.method=preset, not {self.method}")
        # `none` switches off whatever else is set.
        if self.method in ("token_tis", "preset"):
            for name in ("weighting", "filters", "veto", "normalise", "denominator", "mode"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(f"{name}: method=custom alone reads it, not {self.method}; unset one of both")
        if self.method == "custom" and self.mode == "bypass":
            if self.normalise != "none":
                raise ValueError(
                    f"normalise={self.normalise} needs the weights of a whole batch; mode=bypass makes them part by "
                    "part, of the policy that is updated"
                )
            if self.denominator == "kept":
                raise ValueError("denominator=kept is not known in time with mode=bypass, which rejects part by part")
        return self
