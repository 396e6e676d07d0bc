"""The policy in an engine's own process: the requests of `ResidentEngine` to the model that generates.

vLLM and SGLang bring a request here in a way of their own. Arguments and results are numbers, strings, bytes, lists and
dicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8core.rollout.held_weights import HeldWeights
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec, open_shared
from fp8core.rollout.slots import Cut, Shares, Slot


class HeldPolicy(ABC):
    """Weights written in place, scales set, both read back; an engine adds where its library keeps scales and cache."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._version: int | None = None
        self._weights: HeldWeights | None = None

    def answer(self, method: str, *arguments: Any) -> Any:
        with torch.inference_mode():
            return getattr(self, method)(*arguments)

    def parameters(self) -> dict[str, list[Any]]:
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._model.named_parameters()}
        return {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}

    def begin(self, shares: Shares | None) -> None:
        """Hold no version and no scales until another policy is written; `shares` are new, or None as they were."""
        self._version = None
        self._forget_scales()
        if shares is not None:
            own = shares[self._rank()]
            share = {name: (Slot(*slot), Cut(*cut[0]) if cut else None) for name, (slot, *cut) in own.items()}
            self._weights = HeldWeights(self._named(), share)
        self._places().clear_filling()

    def write(self, received: SharedWeights) -> list[str]:
        tensors = open_shared(received, self._device)
        self._places().write(self._named(), tensors)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return list(tensors)

    def end(self, version: int) -> None:
        self._version = version

    def set_scales(self, scales: Sequence[Sequence[float]]) -> None:
        self._write_scales(scales)

    def read_back(self) -> dict[str, Any]:
        """Version, lane sums of every tensor or its part from the parameters themselves, and the scales in force."""
        sums = self._places().sums(self._named(), self._gather)
        return {"version": self._version, "sums": sums, "scales": self.scales()}

    def scales(self) -> list[list[float]]:
        return self._read_scales() if self._has_scales() else []

    def clear_cache(self) -> None:
        """Zero the KV cache: after sleep it holds whatever bytes were there, NaN among them."""
        for cache in self._caches():
            cache.zero_()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Names of what runs: `model`, `linears` with kernel and type, `attention` by layer, `head`, `activations`."""

    @abstractmethod
    def _has_scales(self) -> bool:
        """False where the cache is BF16."""

    @abstractmethod
    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        """In place: captured graphs read the same buffers."""

    @abstractmethod
    def _read_scales(self) -> list[list[float]]:
        """From the device, where they are in force; NaN where a copy that a kernel reads differs."""

    @abstractmethod
    def _caches(self) -> Iterable[Tensor]: ...

    def _rank(self) -> int:
        return 0

    def _gather(self, part: Tensor, axis: int) -> Tensor:
        return part

    def _forget_scales(self) -> None:
        """NaN until they are set. Without an FP8 cache vLLM's own 1.0 stays: some kernels multiply by it."""
        if self._has_scales():
            self._write_scales([[torch.nan] * 3 for _ in self._read_scales()])

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _places(self) -> HeldWeights:
        assert self._weights is not None, "begin() comes first"
        return self._weights
