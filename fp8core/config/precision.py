"""The precision contract, and the bounds on how far its two sides may be apart.

The contract is checked before anything is loaded, and compared with what the engines report (`describe()`).
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fp8core.config.section import Section
from fp8core.numerics.recipe import AttentionProducts, Recipe, RecipeName, recipe_of

LinearFormat = Literal["fp32", "bf16", "fp8_block"]
CacheFormat = Literal["fp32", "bf16", "fp8"]
HeadFormat = Literal["fp32", "bf16"]
PointsName = Literal["stepwise", "native", "kernels", "fused"]


class SidePrecision(Section):
    linear: LinearFormat = Field("fp8_block", description="Linear layers.")
    kv_cache: CacheFormat = Field("fp8", description="K and V; fp8 in training emulates cache and attention.")
    head: HeadFormat = Field("fp32", description="Logits.")

    @model_validator(mode="after")
    def _fp32_is_all_or_nothing(self) -> "SidePrecision":
        if (self.linear == "fp32") != (self.kv_cache == "fp32"):
            raise ValueError(
                f"linear={self.linear} with kv_cache={self.kv_cache}: fp32 is a reference mode for a whole side; "
                "set both to fp32 or neither"
            )
        return self


class TrainingPrecision(SidePrecision):
    """Formats of training: the forward of `SidePrecision`, and the backward GEMMs."""

    backward: LinearFormat | None = Field(None, description="dgrad and wgrad; null follows `linear`.")

    @property
    def backward_format(self) -> LinearFormat:
        return self.linear if self.backward is None else self.backward

    @model_validator(mode="after")
    def _backward_not_narrower(self) -> "TrainingPrecision":
        if self.backward_format == "fp8_block" and self.linear != "fp8_block":
            raise ValueError(
                f"backward=fp8_block with linear={self.linear}: the backward reuses the forward's FP8 weight tiles; "
                "set training.linear to fp8_block or backward to null"
            )
        return self


class PrecisionContract(Section):
    rollout: SidePrecision = Field(default_factory=SidePrecision)
    training: TrainingPrecision = Field(default_factory=TrainingPrecision)
    scale_rule: RecipeName = Field("fp32_activations", description="Recipe of block FP8 (docs/concepts/precision.md).")
    attention: AttentionProducts | None = Field(None, description="Q and P over an FP8 cache; null: as in the recipe.")
    rounding_points: PointsName = Field("stepwise", description="Where a forward rounds (docs/concepts/precision.md).")
    bf16_first_layers: int = Field(0, ge=0, description="Decoder layers kept in BF16 at the start.")
    bf16_last_layers: int = Field(0, ge=0, description="Decoder layers kept in BF16 at the end.")
    accept_mismatch: bool = Field(False, description="Allow different formats without a correction.")

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.scale_rule, self.attention, (self.bf16_first_layers, self.bf16_last_layers))

    @property
    def differing(self) -> list[tuple[str, str, str]]:
        """The parts in which rollout and training differ, with the format of each."""
        parts = ("linear", "kv_cache", "head")
        formats = [(part, getattr(self.rollout, part), getattr(self.training, part)) for part in parts]
        return [(part, ours, theirs) for part, ours, theirs in formats if ours != theirs]

    def attention_of(self, side: SidePrecision) -> AttentionProducts | CacheFormat:
        """The attention of a side: the format of its cache, and of products where that is FP8."""
        return self.recipe.attention if side.kv_cache == "fp8" else side.kv_cache


_NoBound = Literal["none"] | None
Error = Annotated[float, Field(ge=1, le=1e6)] | _NoBound
Distance = Annotated[float, Field(ge=0, le=1e9)] | _NoBound
Share = Annotated[float, Field(ge=0, le=1)] | _NoBound
Slope = Annotated[float, Field(ge=-1e6, le=1e6)] | _NoBound
Count = Annotated[int, Field(ge=0)] | _NoBound


class StopConfig(Section):
    """Bounds that a training must keep (docs/guides/operate.md): null takes the default of the run's contract, none
    bounds nothing."""

    error: Error = Field(None, description="Largest token multiplicative probability error; 1 is equality.")
    tokens_differing: Count = Field(None, description="Most tokens of a step that both sides score differently.")
    k3: Distance = Field(None, description="Largest k3 estimate of KL(rollout, training).")
    effective_sample_size: Share = Field(None, description="Smallest one, as a share of the tokens.")
    ratio_bias: Distance = Field(None, description="Largest |mean importance ratio - 1| in the first update of a step.")
    ratio_deviation: Distance = Field(None, description="Largest |importance ratio - 1| in the first update.")
    ratio_clipped: Share = Field(None, description="Largest share of tokens clipped in the first update.")
    reward_slope: Slope = Field(None, description="Smallest slope of the reward along the first update.")
    mask_differing: Count = Field(None, description="Most tokens whose place in the loss is wrong.")
    probe_differing: Count = Field(None, description="Most tokens of a probe that are scored differently.")
    probe_error: Error = Field(None, description="Largest error over the probe after a sync.")
    patience: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Steps in a row beyond a bound before the action; null: 1 where equal bits are promised, else 3.",
    )
    action: Literal["none", "warn", "pause", "fail"] | None = Field(
        None, description="What happens then (docs/guides/operate.md); null: fail; warn where a mismatch is accepted."
    )


class AlignmentConfig(Section):
    stop: StopConfig = Field(default_factory=StopConfig)
