"""The seconds of `train/update_gain` at the linears of Qwen3-8B on a GPU, and its values for updates of 1e-5.

python -m benchmarks.studies.update_gain_hopper
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8core.numerics.recipe import FP32_ACTIVATIONS
from fp8core.training.update_gain import Tile, UpdateGain, sampled_tiles

_HIDDEN, _WIDTH, _KV, _LAYERS = 4096, 12288, 1024, 36
_SHAPES = {
    "q": (_HIDDEN, _HIDDEN),
    "k": (_KV, _HIDDEN),
    "v": (_KV, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate": (_WIDTH, _HIDDEN),
    "up": (_WIDTH, _HIDDEN),
    "down": (_HIDDEN, _WIDTH),
}


def main() -> None:
    """Print a line for each update."""
    shapes = {f"{layer} {name}": shape for layer in range(_LAYERS) for name, shape in _SHAPES.items()}
    generator = torch.Generator("cuda").manual_seed(0)
    masters = {
        name: torch.randn(shape, device="cuda", generator=generator).mul_(0.02).bfloat16().float()
        for name, shape in shapes.items()
    }

    def read(tiles: Sequence[Tile]) -> list[Tensor]:
        return [tile.cut(masters[tile.name]) for tile in tiles]

    gain = UpdateGain(sampled_tiles(shapes), read, lambda _: "fp8_block", FP32_ACTIVATIONS.weights, list)
    for update in range(1, 16):
        for master in masters.values():
            master += 1e-5
        torch.cuda.synchronize()
        start = time.perf_counter()
        value = gain.measured()
        print(f"update {update}: gain {value:.3f}, {time.perf_counter() - start:.3f} s", flush=True)


if __name__ == "__main__":
    main()
