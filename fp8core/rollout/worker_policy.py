"""The policy in an engine's own process: the requests of `ResidentEngine` to the model that generates.

Arguments and results are plain values. Weights are written in place, and read back from where they lie.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.numerics.fingerprint import Slice, slice_sums
from fp8core.rollout.shared_weights import SharedTensors, SharedWeights, TensorSpec, open_weights
from fp8core.rollout.slots import Cut, Share, Shares, Slot

# A copy of its own costs a processor as long as this takes to copy; smaller ones are launched together.
_LARGE_BYTES = 4 << 20


class _Rows(NamedTuple):
    """Rows of a parameter for a shipped tensor, or for its part `cut`; `flat`: their bytes if contiguous."""

    spec: TensorSpec
    rows: Tensor
    flat: Tensor | None
    cut: Cut | None


class WeightPlaces:
    """The places of all shipped tensors in a model's parameters, found once: experts are tens of thousands."""

    def __init__(self, parameters: Mapping[str, Tensor], share: Share) -> None:
        own = {slot.parameter: parameters[slot.parameter].data for slot, _ in share.values()}
        self._addresses = {name: parameter.data_ptr() for name, parameter in own.items()}
        self._filled_up = [own[name] for name in {slot.parameter for slot, _ in share.values() if slot.filled_up}]
        self._places = {name: _rows(slot.of(own[slot.parameter]), cut) for name, (slot, cut) in share.items()}
        # Slices are read in place; the rest is not.
        self._slices = {name: _slice_of(place) for name, place in self._places.items() if _lies_whole(place)}
        self._rest = {name: place for name, place in self._places.items() if name not in self._slices}

    def clear_filling(self) -> None:
        for parameter in self._filled_up:
            parameter.view(torch.uint8).zero_()

    def write(self, parameters: Mapping[str, Tensor], received: SharedTensors) -> None:
        self._check_addresses(parameters)
        targets = list[Tensor]()
        sources = list[Tensor]()
        for name, (spec, flat) in received.items():
            place = self._places[name]
            cut = place.cut
            if place.flat is None or (cut is not None and cut.axis == 1):
                whole = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
                part = whole if cut is None else cut.of(whole)
                assert TensorSpec.of(part) == place.spec, name
                place.rows.copy_(part)
                continue
            source = flat
            if cut is not None:
                row = len(flat) // cut.whole
                source = flat[cut.first * row : (cut.first + cut.size) * row]
                spec = spec._replace(shape=(cut.size, *spec.shape[1:]))
            assert spec == place.spec, name
            if spec.bytes >= _LARGE_BYTES:
                place.flat.copy_(source)
            else:
                targets.append(place.flat)
                sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources)

    def sums(self, parameters: Mapping[str, Tensor], gather: Callable[[Tensor, int], Tensor]) -> dict[str, list[int]]:
        """`fingerprint.slice_sums` of every tensor or its part."""
        self._check_addresses(parameters)
        sums = dict[str, list[int]]()
        if self._slices:
            sums |= zip(self._slices, slice_sums(list(self._slices.values())), strict=True)
        for name, place in self._rest.items():
            if place.cut is not None and place.cut.is_gathered:
                part = Slice.whole(gather(place.rows, place.cut.axis))
            else:
                part = _slice_of(place)
            # One after another: there is no room for all of them.
            (sums[name],) = slice_sums([part])
        return sums

    def _check_addresses(self, parameters: Mapping[str, Tensor]) -> None:
        for name, address in self._addresses.items():
            assert parameters[name].data_ptr() == address, f"{name} was moved, and captured graphs read what is left"


def _rows(rows: Tensor, cut: Cut | None) -> _Rows:
    flat = rows.view(-1).view(torch.uint8) if rows.is_contiguous() else None
    return _Rows(TensorSpec.of(rows), rows, flat, cut)


def _lies_whole(place: _Rows) -> bool:
    return place.flat is not None and not (place.cut is not None and place.cut.is_gathered)


def _slice_of(place: _Rows) -> Slice:
    elements = place.rows.contiguous() if place.flat is None else place.flat
    if (cut := place.cut) is None:
        return Slice.whole(elements)
    row = place.rows[:1].nbytes
    return Slice(elements, cut.first * row, cut.whole * row if cut.ends else None)


class WorkerPolicy(ABC):
    """An engine adds where its library keeps scales and cache."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._version: int | None = None
        self._weights: WeightPlaces | None = None

    def answer(self, method: str, *arguments: Any) -> Any:
        with torch.inference_mode():
            return getattr(self, method)(*arguments)

    def parameters(self) -> dict[str, list[Any]]:
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._model.named_parameters()}
        return {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}

    def begin(self, shares: Shares | None) -> None:
        """Hold no version and no scales until another policy is written; `shares` are new, or None as they were."""
        self._version = None
        # NaN until they are set. Without an FP8 cache vLLM's own 1.0 stays: some kernels multiply by it.
        if self._has_scales():
            self._write_scales([[torch.nan] * 3 for _ in self._read_scales()])
        if shares is not None:
            own = shares[self._rank()]
            share = {name: (Slot(*slot), Cut(*cut[0]) if cut else None) for name, (slot, *cut) in own.items()}
            self._weights = WeightPlaces(self._parameters_by_name(), share)
        self._places().clear_filling()

    def write(self, received: SharedWeights) -> list[str]:
        tensors = open_weights(received, self._device)
        self._places().write(self._parameters_by_name(), tensors)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return list(tensors)

    def end(self, version: int) -> None:
        self._version = version

    def set_scales(self, scales: Sequence[Sequence[float]]) -> None:
        self._write_scales(scales)

    def read_back(self) -> dict[str, Any]:
        """Version, lane sums, and the scales in force."""
        sums = self._places().sums(self._parameters_by_name(), self._gather)
        return {"version": self._version, "sums": sums, "scales": self.scales()}

    def scales(self) -> list[list[float]]:
        return self._read_scales() if self._has_scales() else []

    def clear_cache(self) -> None:
        """After sleep it holds whatever bytes were there, NaN among them."""
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

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _places(self) -> WeightPlaces:
        assert self._weights is not None, "begin() comes first"
        return self._weights
