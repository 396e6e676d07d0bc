"""Matrices on which a block-FP8 quantiser that is only almost right differs from the reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.numerics.e4m3 import decode, scale_from_amax
from fp8core.numerics.recipe import AMAX_FLOOR, TILE

SHAPES = [(1, 1), (3, 128), (128, 128), (130, 5), (129, 257), (256, 384), (64, 300), (1000, 640), (512, 1152)]
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Case:
    """One matrix, FP32 or BF16, on the CPU."""

    name: str
    x: Tensor


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every kind of values on shapes with full and partial groups; hard quotients in whole groups as well."""
    for kind, values in _KINDS.items():
        for i, (rows, columns) in enumerate(SHAPES):
            generator = torch.Generator().manual_seed(i)
            yield Case(f"{kind} {rows}x{columns}", values(rows, columns, generator).to(dtype))
    for rule in ("pow2", "fp32"):
        x = _near_ties(rule, dtype)
        yield Case(f"ties of rows, {rule}", x)
        yield Case(f"ties of columns, {rule}", x.t().contiguous())
        yield Case(f"ties of tiles, {rule}", _as_tiles(x))


def _heavy_tails(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(3 * spread)
    return x * (torch.rand(rows, columns, generator=generator) > 0.1)


def _any_bits(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random finite bit patterns that BF16 can hold, subnormals included."""
    bits = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)
    x = bits.view(torch.float32).bfloat16().float() if rows % 2 else bits.view(torch.float32)
    return torch.where(x.isfinite() & (x.abs() < 2.0**127), x, 1.0)


def _small_bits(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Subnormals, signed zeros and magnitudes about the floor of amax."""
    pool = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 2.0**-126, -(2.0**-133), 2.0**-101, -(2.0**-102)])
    floor = torch.tensor(AMAX_FLOOR)
    about = torch.stack([floor, floor.nextafter(torch.tensor(0.0)), floor.nextafter(torch.tensor(1.0)), -floor / 448])
    pool = torch.cat([pool, about])
    return pool[torch.randint(0, len(pool), (rows, columns), generator=generator)]


def _powers(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Powers of two and 448 times them with their neighbours, of both signs; one exponent by row and column."""
    exponent = torch.randint(-30, 30, (rows, 1), generator=generator) + torch.randint(
        -12, 1, (rows, columns), generator=generator
    )
    x = torch.ldexp(torch.tensor([1.0, 448.0])[exponent % 2], exponent)
    up, down = x.nextafter(torch.tensor(_FLOAT32_MAX)), x.nextafter(torch.tensor(0.0))
    pick = torch.randint(0, 3, (rows, columns), generator=generator)
    sign = 1.0 - 2.0 * torch.randint(0, 2, (rows, columns), generator=generator)
    return torch.stack([x, up, down]).gather(0, pick[None])[0] * sign


def _zeros_and_largest(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Groups of signed zeros alone, and the largest magnitudes there are."""
    x = torch.copysign(torch.zeros(rows, columns), torch.randn(rows, columns, generator=generator))
    largest = torch.finfo(torch.bfloat16).max
    x[rows // 2 :: 3] = largest * torch.rand(rows, columns, generator=generator)[rows // 2 :: 3]
    x[-1, -1] = -largest
    return x


_KINDS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "heavy tails": _heavy_tails,
    "any bits": _any_bits,
    "small bits": _small_bits,
    "powers": _powers,
    "zeros and largest": _zeros_and_largest,
}


def _near_ties(rule: str, dtype: torch.dtype) -> Tensor:
    """Groups [2048, 128] of a random amax and 127 values whose quotients lie on or next to a boundary of two codes.

    A midpoint times the scale and its two neighbours are the hardest inputs to decide. The quotient has to be rounded
    to FP32 as a division does.
    """
    generator = torch.Generator().manual_seed(7)
    amax = torch.exp2(20 * torch.randn(2048, generator=generator)).to(dtype).float()
    scales = scale_from_amax(amax, "pow2" if rule == "pow2" else "fp32")
    grid = decode(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    midpoints = (grid[:-1] + grid[1:]) / 2
    pick = torch.randint(0, len(midpoints), (len(amax), TILE - 1), generator=generator)
    x = (midpoints[pick] * scales[:, None]).to(dtype)
    towards = torch.tensor([0.0, _FLOAT32_MAX]).to(dtype)[torch.randint(0, 2, x.shape, generator=generator)]
    stay = torch.rand(x.shape, generator=generator) < 1 / 3
    x = torch.where(stay, x, x.nextafter(towards)).float()
    sign = 1.0 - 2.0 * torch.randint(0, 2, x.shape, generator=generator)
    return torch.cat([amax[:, None], torch.minimum(x, amax[:, None]) * sign], dim=1).to(dtype)


def _as_tiles(x: Tensor) -> Tensor:
    """Tiles of one amax each: a group is repeated over the rows of its tile."""
    groups = x[:16].view(4, 4, 1, TILE).expand(4, 4, TILE, TILE)
    return groups.permute(0, 2, 1, 3).reshape(4 * TILE, 4 * TILE).contiguous()
