"""Rotary angles as Megatron's attention takes them, from the frequencies that our own decoder uses."""

from typing import Any

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.numerics.elementwise import inverse_frequencies, scale_frequencies


class RotaryAngles(torch.nn.Module):
    """Stands in the place of Megatron's `RotaryEmbedding`, with any factors of Llama 3.1's scaling."""

    def __init__(self, arch: Architecture, device: torch.device) -> None:
        super().__init__()
        frequencies = inverse_frequencies(arch.head_dim, arch.rope_theta)
        if (rope := arch.rope_scaling) is not None:
            frequencies = scale_frequencies(
                frequencies, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
            )
        self._frequencies = frequencies.to(device)

    def get_rotary_seq_len(self, context: Any, decoder: Any, hidden: Any, config: Any, packed: Any) -> int:
        """Positions that a call of Megatron's model needs: those of the longest sequence in the pack."""
        return int(packed.max_seqlen_q)

    def forward(self, positions: int, **_: Any) -> Tensor:
        """Angles of positions 0, 1, ...: FP32 [positions, 1, 1, head_dim], each of the two halves the same."""
        steps = torch.arange(positions, dtype=torch.float32, device=self._frequencies.device)
        angles = steps[:, None] * self._frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
