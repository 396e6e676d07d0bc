"""One tensor of a checkpoint from BF16 to block FP8 and back, some rows of tiles at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8core.models.safetensors_stream import StoredTensor, TensorSpec
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.e4m3 import TILE, GroupNotFinite, ScaleRule, decode, encode, quantise_tiles

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")

# 2 MiB of FP32: a processor's cache holds it.
_CHUNK_ELEMENTS = 1 << 19


class Conversion(Protocol):
    """One tensor of the source on its way into the target."""

    @property
    def stored(self) -> StoredTensor:
        """The tensor of the source."""
        ...

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """What it becomes."""
        ...

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Consecutive parts of the results, by name; a UserError names a tensor that cannot be converted."""
        ...


@dataclass(frozen=True)
class Quantised:
    """A matrix to E4M3 codes and the scales of its tiles, by rows of tiles."""

    stored: StoredTensor
    rule: ScaleRule

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        name, shape = self.stored.spec.name, self.stored.spec.shape
        return TensorSpec(name, "F8_E4M3", shape), TensorSpec(name + SCALE_SUFFIX, "F32", _tiles(shape))

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        codes, scales = (spec.name for spec in self.results)
        columns = self.stored.spec.shape[1]
        for chunk in self.stored.chunks(_rows(columns) * columns):
            values = chunk.view(FLOATS[self.stored.spec.dtype]).view(-1, columns)
            try:
                grid, tile_scales = quantise_tiles(values.bfloat16().float(), self.rule)
            except GroupNotFinite as error:
                raise self.stored.refused("holds NaN or infinity in BF16") from error
            yield codes, encode(grid)
            yield scales, tile_scales


@dataclass(frozen=True)
class Dequantised:
    """E4M3 codes and their scales to a matrix in BF16, by rows of tiles."""

    stored: StoredTensor
    scales: StoredTensor

    def __post_init__(self) -> None:
        shape, tiles, scales = self.stored.spec.shape, _tiles(self.stored.spec.shape), self.scales.spec
        if len(shape) != 2 or 0 in shape or scales.shape != tiles or scales.dtype not in FLOATS:
            raise self.scales.refused(
                f"expected floating-point {list(tiles)} for weights {list(shape)}, found {scales.dtype} "
                f"{list(scales.shape)}"
            )

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(self.stored.spec.name, "BF16", self.stored.spec.shape),)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        columns = self.stored.spec.shape[1]
        rows = _rows(columns)
        for scales, chunk in zip(self._scales(rows), self.stored.chunks(rows * columns), strict=True):
            grid = decode(chunk).view(-1, columns)
            by_row = scales.repeat_interleave(TILE, dim=0)[: len(grid)]
            values = (grid * by_row.repeat_interleave(TILE, dim=1)[:, :columns]).bfloat16()
            if not _is_finite(values):
                raise self.stored.refused("holds NaN, or values beyond BF16")
            yield self.stored.spec.name, values

    def _scales(self, rows: int) -> Iterator[Tensor]:
        """FP32 scales of `rows` rows of the matrix at a time."""
        per_row = self.scales.spec.shape[1]
        for chunk in self.scales.chunks(rows // TILE * per_row):
            scales = chunk.view(FLOATS[self.scales.spec.dtype]).float()
            if not bool(((scales > 0) & (scales < float("inf"))).all()):
                raise self.scales.refused("a scale is not positive and finite")
            yield scales.view(-1, per_row)


@dataclass(frozen=True)
class Kept:
    """A tensor that is not quantised, in its own type or narrowed to BF16."""

    stored: StoredTensor
    dtype: str

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(self.stored.spec.name, self.dtype, self.stored.spec.shape),)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.stored.chunks(_CHUNK_ELEMENTS):
            if self.stored.spec.dtype in INTEGERS:
                yield self.stored.spec.name, chunk
                continue
            values = chunk.view(FLOATS[self.stored.spec.dtype]).to(FLOATS[self.dtype])
            if not _is_finite(values):
                raise self.stored.refused(f"holds NaN or infinity in {self.dtype}")
            yield self.stored.spec.name, values


def _is_finite(values: Tensor) -> bool:
    # The maximum of anything with NaN is NaN; `isfinite` of every element takes many times as long in BF16.
    return bool(values.abs().amax().isfinite())


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // TILE) for side in shape)


def _rows(columns: int) -> int:
    """Rows of a chunk: whole tiles."""
    return max(1, _CHUNK_ELEMENTS // (columns * TILE)) * TILE
