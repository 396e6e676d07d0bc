"""The gain of first updates of a full training, with FP32 masters that begin between two BF16 numbers.

A master of a BF16 checkpoint begins on a BF16 number, so a change below half a step of BF16 rounds back. A dither adds
a uniform offset below half a step. The masters still round to the checkpoint, but a change d crosses a boundary with
probability d / step.

Weights are a checkpoint's. Every element moves by the rate in each update, as under AdamW's first ones, always the same
way. `noise` is the part of dQ that is orthogonal to dM,
in norms of dM.

    python -m benchmarks.real_checkpoint FOLDER
    python -m benchmarks.studies.masters_dither FOLDER/model
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from fp8core.models.safetensors_stream import FLOATS, read_folder
from fp8core.models.weights import is_linear
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.recipe import POW2, TILE
from fp8core.training.update_gain import sampled_tiles

RATES, UPDATES = (1e-6, 1e-5), (1, 15, 50)


def tiles_of(folder: Path) -> Tensor:
    """FP32 [rows, 128] of whole tiles of a checkpoint's linears, one above the other."""
    stored = {name: each for name, each in read_folder(folder).items() if is_linear(name)}
    found = []
    for tile in sampled_tiles({name: each.spec.shape for name, each in stored.items()}):
        (data,) = stored[tile.name].chunks(stored[tile.name].spec.elements)
        cut = tile.cut(data.view(FLOATS[stored[tile.name].spec.dtype]).view(stored[tile.name].spec.shape).float())
        if cut.shape == (TILE, TILE):
            found.append(cut)
    return torch.cat(found)


def dithered(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Each weight plus a uniform offset below half a step of BF16 at its exponent."""
    _, exponent = torch.frexp(weights)
    step = torch.ldexp(torch.ones_like(weights), exponent - 8)
    found = weights + (torch.rand(weights.shape, generator=generator) - 0.5) * step
    # Below a power of two a step is half as long.
    return torch.where(found.bfloat16().float() == weights, found, weights)


def shipped(masters: Tensor, form: str) -> Tensor:
    """FP64 of what is shipped."""
    narrow = masters.bfloat16().float()
    if form == "bf16":
        return narrow.double()
    grid, scales = quantise_tiles(narrow, POW2.weights)
    return grid.double() * scales.double().repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)


def main() -> None:
    """Print a row for each rate and number of updates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    weights, generator = tiles_of(parser.parse_args().model), torch.Generator().manual_seed(0)
    starts = {"BF16 numbers": weights, "dither": dithered(weights, generator)}
    print(f"{weights.numel()} weights, rms {float(weights.square().mean().sqrt()):.3g}")
    print("| rate | updates | BF16 | BF16, dither | FP8 | FP8, dither | noise | noise, dither |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    sign = torch.where(torch.rand(weights.shape, generator=generator) < 0.5, 1.0, -1.0)
    for rate in RATES:
        for updates in UPDATES:
            print(f"| {rate:g} | {updates} | {' | '.join(_cells(starts, updates * rate * sign))} |", flush=True)


def _cells(starts: dict[str, Tensor], moved: Tensor) -> list[str]:
    gains, noises = [], []
    for form in ("bf16", "fp8"):
        for start in starts.values():
            intended = (start + moved).double() - start.double()
            arrived = shipped(start + moved, form) - shipped(start, form)
            gain = float((arrived * intended).sum() / intended.square().sum())
            gains.append(f"{gain:.3f}")
            noises.append(f"{float((arrived - gain * intended).norm() / intended.norm()):.1f}")
    return [*gains, *noises[2:]]


if __name__ == "__main__":
    main()
