"""Frequencies of rotary positions, and their scaling to longer contexts (`rope_scaling` of a config.json).

Formulas and names of fields are those of transformers (modeling_rope_utils.py). Frequencies are FP32 [head_dim / 2], on
the CPU, because a GPU's power has other last bits."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2i / d)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    rope_type: ClassVar = "linear"
    attention_scale: ClassVar = 1.0
    factor: float

    def frequencies(self, dim: int, theta: float) -> Tensor:
        return inverse_frequencies(dim, theta) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Wavelengths above original / low are stretched in full, those below original / high not."""

    rope_type: ClassVar = "llama3"
    attention_scale: ClassVar = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, dim: int, theta: float) -> Tensor:
        plain = inverse_frequencies(dim, theta)
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - smooth) * plain / self.factor + smooth * plain


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). Dimensions that turn more often than `beta_fast` in the original context stay as they
    are. Those below `beta_slow` are stretched in full."""

    rope_type: ClassVar = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def max_positions(self) -> int:
        return int(self.factor * self.original_max_position_embeddings)

    @property
    def attention_scale(self) -> float:
        """Cosines and sines are multiplied by this."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        low, high = (self._dimension(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        share = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
        powers = theta ** (torch.arange(0, dim, 2, device="cpu").float() / dim)
        return 1.0 / (self.factor * powers) * (1 - share) + 1.0 / powers * share

    def _dimension(self, turns: float, dim: int, theta: float) -> float:
        """The one that turns so often in the original context."""
        return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS = {kind.rope_type: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling)}
