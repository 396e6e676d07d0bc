"""Statistics of Q, K and V as Megatron's attention receives them: normed, rotated, this process's heads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8core.numerics.kv_scales import KvStatistics, LayerScales

Hook = Callable[[torch.nn.Module, tuple[Any, ...]], None]


class Observer:
    """Adds what passes by to statistics; `valid` is set before each pass."""

    def __init__(self, statistics: KvStatistics, scales: Sequence[LayerScales] | None) -> None:
        self._statistics, self._scales = statistics, scales
        self.valid: Tensor | None = None

    def hook(self, layer: int) -> Hook:
        """A forward pre-hook of one layer's core attention."""

        def observe(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            assert self.valid is not None, "observed before a pass began"
            assert not torch.is_grad_enabled(), "a pass with gradients may run twice"
            q, k, v = (x.detach().transpose(0, 1)[None] for x in arguments[:3])
            scales = None if self._scales is None else self._scales[layer]
            self._statistics.observe(layer, (q, k, v), self.valid, scales)

        return observe
