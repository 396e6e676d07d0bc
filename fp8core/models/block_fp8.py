"""One tensor of a checkpoint on its way to block FP8, read back from it in BF16, or kept as it is."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.models.safetensors_files import StoredTensor
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import GroupNotFinite, decode, encode, quantise_tiles
from fp8core.numerics.recipe import TILE, Grouping

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")

# 2 MiB of FP32: a processor's cache holds it.
_CHUNK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Quantised:
    """A matrix to E4M3 codes and the scales of its tiles."""

    stored: StoredTensor
    tiles: Grouping

    def tensors(self) -> dict[str, Tensor]:
        """The results by name. Raises UserError: the tensor cannot be read or converted."""
        codes, scales = list[Tensor](), list[Tensor]()
        for part in _row_blocks(self.stored.whole()):
            try:
                grid, tile_scales = quantise_tiles(part.bfloat16().float(), self.tiles)
            except GroupNotFinite as error:
                raise self.stored.refused("holds NaN or infinity in BF16") from error
            codes.append(encode(grid).view(torch.uint8))
            scales.append(tile_scales)
        name = self.stored.spec.name
        return {name: torch.cat(codes).view(torch.float8_e4m3fn), name + SCALE_SUFFIX: torch.cat(scales)}


@dataclass(frozen=True)
class Dequantised:
    """E4M3 codes and their scales to a matrix in BF16: `code * scale` in FP32, rounded once."""

    stored: StoredTensor
    scales: StoredTensor

    def __post_init__(self) -> None:
        shape, tiles, scales = self.stored.spec.shape, _tiles(self.stored.spec.shape), self.scales.spec
        if len(shape) != 2 or 0 in shape or scales.shape != tiles or scales.dtype not in FLOATS:
            raise self.scales.refused(
                f"expected floating-point {list(tiles)} for weights {list(shape)}, found {scales.dtype} "
                f"{list(scales.shape)}"
            )

    def absolute(self) -> "Dequantised":
        return Dequantised(self.stored.absolute(), self.scales.absolute())

    def whole(self) -> Tensor:
        """The matrix. Raises UserError: the file cannot be read, or holds codes without a value."""
        scales = self.scales.whole().float()
        if not bool(((scales > 0) & (scales < float("inf"))).all()):
            raise self.scales.refused("a scale is not positive and finite")
        columns, parts, tile_row = self.stored.spec.shape[1], list[Tensor](), 0
        for part in _row_blocks(self.stored.whole()):
            rows = -(-len(part) // TILE)
            by_row = scales[tile_row : tile_row + rows].repeat_interleave(TILE, dim=0)[: len(part)]
            grid = decode(part.view(torch.uint8))
            parts.append((grid * by_row.repeat_interleave(TILE, dim=1)[:, :columns]).bfloat16())
            tile_row += rows
        values = torch.cat(parts)
        if not _is_finite(values):
            raise self.stored.refused("holds NaN, or values beyond BF16")
        return values


@dataclass(frozen=True)
class Kept:
    stored: StoredTensor
    dtype: str

    def tensors(self) -> dict[str, Tensor]:
        values = self.stored.whole()
        if self.stored.spec.dtype not in INTEGERS:
            values = values.to(FLOATS[self.dtype])
            if values.numel() and not _is_finite(values):
                raise self.stored.refused(f"holds NaN or infinity in {self.dtype}")
        return {self.stored.spec.name: values}


def _is_finite(values: Tensor) -> bool:
    # The maximum of anything with NaN is NaN; `isfinite` of every element takes many times as long in BF16.
    return bool(values.abs().amax().isfinite())


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // TILE) for side in shape)


def _row_blocks(matrix: Tensor) -> Iterator[Tensor]:
    yield from matrix.split(max(1, _CHUNK_ELEMENTS // (matrix.shape[1] * TILE)) * TILE)
