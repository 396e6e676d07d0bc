"""Models of block quantisation that share no code with the library: plain loops, scales found by exact comparison."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

SlowQuantise = Callable[[Tensor, str, int, int], tuple[Tensor, Tensor]]
RandomGrid = Callable[[int, int, int], Tensor]


@pytest.fixture(scope="session")
def slow_quantise() -> SlowQuantise:
    """(x, rule, height, width, floor of amax) to E4M3 values and scales, by block; those at the edge may be smaller."""

    def quantise(x: Tensor, rule: str, height: int, width: int, floor: float = 1e-10) -> tuple[Tensor, Tensor]:
        rows, columns = range(0, x.shape[0], height), range(0, x.shape[1], width)
        grid, scales = torch.empty_like(x), torch.empty(len(rows), len(columns))
        for i, top in enumerate(rows):
            for j, left in enumerate(columns):
                block = (slice(top, top + height), slice(left, left + width))
                scales[i, j] = _scale(max(float(x[block].abs().max()), float(np.float32(floor))), rule)
                codes = (x[block] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                grid[block] = codes.float()
        return grid, scales

    return quantise


def _scale(amax: float, rule: str) -> float:
    if rule == "fp32":
        return float(np.float32(amax) / np.float32(448))
    return next(2.0**k for k in range(-126, 121) if 448 * 2.0**k >= amax)


@pytest.fixture(scope="session")
def random_grid() -> RandomGrid:
    """(rows, columns, seed) to FP32 values: E4M3 codes drawn uniformly, without NaN."""

    def draw(rows: int, columns: int, seed: int) -> Tensor:
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        return codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0)

    return draw
