"""The trainings that a parity run compares: one configuration in BF16 and in steps towards FP8 everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fp8core.config.run import CorrectionConfig, RunConfig

BASELINE = "bf16"
STRESS = "stress"
Side = Literal["bf16", "fp8", "fp8+kv"]

_FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_block", "bf16"), "fp8+kv": ("fp8_block", "fp8")}
_UNCORRECTED = {"correction.method": "none", "correction.preset": None, "precision.accept_mismatch": True}


@dataclass(frozen=True)
class Variant:
    """Formats of both sides, and what else differs from the configuration."""

    name: str
    title: str
    rollout: Side
    training: Side
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def matched(self) -> bool:
        """Whether both sides compute in the same formats."""
        return self.rollout == self.training


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "BF16 on both sides: what the others are compared with", "bf16", "bf16"),
        Variant("fp8-rollout", "generation in FP8, training in BF16, no correction", "fp8", "bf16", _UNCORRECTED),
        Variant("fp8-rollout-corrected", "the same with the correction for the mismatch", "fp8", "bf16"),
        Variant("fp8-end-to-end", "linear layers in FP8 on both sides", "fp8", "fp8"),
        Variant("fp8-end-to-end-kv", "the KV cache and attention in FP8 as well", "fp8+kv", "fp8+kv"),
        Variant(
            STRESS,
            "FP8 everywhere, many large updates on each rollout: raw importance weights must average 1",
            "fp8+kv",
            "fp8+kv",
        ),
    )
}
"""By name, the baseline first."""


def variant_settings(variant: Variant, config: RunConfig, seed: int) -> dict[str, Any]:
    """Overrides of `config`, dotted keys, that make it the variant with a seed.

    The verdict judges alignment at the end: a bound of `alignment.stop` only warns, or a bad variant would not be seen
    to its end.
    """
    settings: dict[str, Any] = {"seed": seed, "alignment.stop.action": "warn"}
    for side, formats in (("rollout", variant.rollout), ("training", variant.training)):
        linear, kv_cache = _FORMATS[formats]
        settings |= {f"precision.{side}.linear": linear, f"precision.{side}.kv_cache": kv_cache}
    settings["precision.training.backward"] = None
    if variant.rollout != "fp8+kv":
        # The aligned model of vLLM is made for FP8 everywhere.
        settings["rollout.vllm.model"] = "stock"
    if corrected(config) != config.correction:
        settings |= {f"correction.{key}": value for key, value in corrected(config).model_dump(mode="json").items()}
    if variant.name == STRESS:
        settings |= stress_settings(config)
    return settings | dict(variant.settings)


def corrected(config: RunConfig) -> CorrectionConfig:
    """The correction of the corrected variants: the configured one, or truncated importance sampling for none."""
    return CorrectionConfig() if config.correction.method == "none" else config.correction


def stress_settings(config: RunConfig) -> dict[str, Any]:
    """Eight updates a rollout, or as many as it has prompts, at ten times the learning rate."""
    return {
        "training.minibatches": min(8, config.rollout.prompts_per_step),
        "training.learning_rate": min(1.0, 10 * config.training.learning_rate),
    }
