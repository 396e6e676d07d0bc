"""The update gain of a policy in Megatron's layers, whose own linears are cut into tiles, as their GEMMs do it.

Of experts it looks at those of the first data-parallel processes.
"""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object, all_reduce

from fp8core.models.weights import Formats
from fp8core.numerics.recipe import TILE
from fp8core.training.megatron.conversion import layers_of
from fp8core.training.megatron.optimiser import Optimiser
from fp8core.training.megatron.parallel import data_group
from fp8core.training.megatron.policy import MegatronPolicy
from fp8core.training.ranks import Ranks
from fp8core.training.update_gain import Sums, Tile, UpdateGain, sampled_tiles


def update_gain(policy: MegatronPolicy, optimiser: Optimiser, formats: Formats, ranks: Ranks) -> UpdateGain:
    shapes = {n: tuple(p.shape) for n, p in policy.parameters().items() if "linear_" in n and p.dim() == 2}
    layers, stored = layers_of(policy.arch, policy.megatron, policy.rank.pipeline), formats.stored_names().layers

    def joined(own: list[Sums]) -> list[Sums]:
        # Other data-parallel processes have the same.
        return ranks.joined(own if data_group().rank() == 0 else [])

    return UpdateGain(
        sampled_tiles(shapes),
        _Masters(optimiser, shapes).tiles,
        lambda name: stored[layers[int(name.split(".layers.")[1].split(".")[0])]].qkv,
        formats.recipe.weights,
        joined,
    )


class _Masters:
    """The masters of this process's linears, of which a distributed optimiser has a flat part."""

    def __init__(self, optimiser: Optimiser, shapes: dict[str, tuple[int, ...]]) -> None:
        self._optimiser, self._shapes = optimiser, shapes
        self._firsts: dict[str, int] = {}
        for experts in (False, True):
            # Each process has a contiguous part, in the order of the ranks.
            own = optimiser.updated().items()
            sizes = {name: len(part) for name, part in own if optimiser.is_expert(name) == experts}
            group = _group(experts)
            found = [sizes] * group.size()
            all_gather_object(found, sizes, group=group)
            self._firsts |= {name: sum(each[name] for each in found[: group.rank()]) for name in sizes}

    def tiles(self, tiles: Sequence[Tile]) -> list[Tensor]:
        """Whole ones, FP32; all processes ask together."""
        own = self._optimiser.updated()
        return [self._tile(tile, own[tile.name]) for tile in tiles]

    def _tile(self, tile: Tile, part: Tensor) -> Tensor:
        rows, columns = self._shapes[tile.name]
        if len(part) == rows * columns:
            return tile.cut(part.view(rows, columns))
        first, stop = tile.row * columns, min(rows, tile.row + TILE) * columns
        band = torch.zeros(stop - first, device=part.device)
        shift = self._firsts[tile.name] - first
        start, end = max(0, shift), min(len(band), shift + len(part))
        if start < end:
            band[start:end] = part[start - shift : end - shift]
        cut = tile.cut(band.view(-1, columns), tile.row).contiguous()
        all_reduce(cut, group=_group(self._optimiser.is_expert(tile.name)))
        return cut


def _group(experts: bool) -> ProcessGroup:
    group: ProcessGroup = parallel_state.get_expert_data_parallel_group() if experts else data_group()
    return group
