"""The settings of a support (`numerics.support`). Imports no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Truncation:
    """`top_k`: at least 1, None for all; `top_p`: in (0, 1], 1 for all; `min_p`: in [0, 1], 0 for all."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def min_exponent(self) -> float:
        return math.log2(self.min_p) if self.min_p else -math.inf
