"""Rotary tables of an architecture: one pair for every decoder and engine that rotates by itself."""

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.numerics.elementwise import inverse_frequencies, scale_frequencies


def rotary_tables(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each FP32 [max_positions, head_dim / 2], not rounded."""
    frequencies = inverse_frequencies(arch.head_dim, arch.rope_theta)
    if (rope := arch.rope_scaling) is not None:
        frequencies = scale_frequencies(
            frequencies, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
        )
    angles = torch.arange(arch.max_positions).float()[:, None] * frequencies
    return angles.cos(), angles.sin()
