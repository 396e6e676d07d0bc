"""The weights that a model holds in an engine's own process: written in place, and read back from where they lie."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fp8core.numerics.fingerprint import Slice, slice_sums
from fp8core.rollout.shared_weights import SharedTensors, TensorSpec
from fp8core.rollout.slots import Cut, Share

# A copy of its own costs a processor as long as this takes to copy; smaller ones are launched together.
_LARGE_BYTES = 4 << 20
# Of the smaller ones, so that a file of weights is not held in memory beside the engine's.
_TOGETHER_BYTES = 64 << 20


class _Rows(NamedTuple):
    """The place of one shipped tensor, or of its part `cut`: rows of a parameter; `flat`: their bytes if contiguous."""

    spec: TensorSpec
    rows: Tensor
    flat: Tensor | None
    cut: Cut | None


class HeldWeights:
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
        targets, sources, together = list[Tensor](), list[Tensor](), 0
        for name in received:
            place, (spec, flat) = self._places[name], received.taken(name)
            if place.flat is None or place.cut is not None:
                whole = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
                part = whole if place.cut is None else place.cut.of(whole)
                assert TensorSpec.of(part) == place.spec, name
                place.rows.copy_(part)
                continue
            assert spec == place.spec, name
            if spec.bytes >= _LARGE_BYTES:
                place.flat.copy_(flat)
                continue
            targets.append(place.flat)
            sources.append(flat)
            together += spec.bytes
            if together >= _TOGETHER_BYTES:
                torch._foreach_copy_(targets, sources)
                targets, sources, together = [], [], 0
        if targets:
            torch._foreach_copy_(targets, sources)

    def sums(
        self, parameters: Mapping[str, Tensor], gather: Callable[[Tensor, int], Tensor] | None = None
    ) -> dict[str, list[int]]:
        """Lane sums of every tensor or its part (`fingerprint.slice_sums`), from the parameters as they are."""
        self._check_addresses(parameters)
        found = dict[str, list[int]]()
        if self._slices:
            found |= zip(self._slices, slice_sums(list(self._slices.values())), strict=True)
        for name, place in self._rest.items():
            if place.cut is not None and place.cut.gathered:
                assert gather is not None, "parts of columns lie on several GPUs"
                part = Slice.whole(gather(place.rows, place.cut.axis))
            else:
                part = _slice_of(place)
            # One after another: there is no room for all of them.
            (found[name],) = slice_sums([part])
        return found

    def _check_addresses(self, parameters: Mapping[str, Tensor]) -> None:
        for name, address in self._addresses.items():
            assert parameters[name].data_ptr() == address, f"{name} was moved, and captured graphs read what is left"


def _rows(rows: Tensor, cut: Cut | None) -> _Rows:
    flat = rows.view(-1).view(torch.uint8) if rows.is_contiguous() else None
    return _Rows(TensorSpec.of(rows), rows, flat, cut)


def _lies_whole(place: _Rows) -> bool:
    return place.flat is not None and not (place.cut is not None and place.cut.gathered)


def _slice_of(place: _Rows) -> Slice:
    elements = place.rows.contiguous() if place.flat is None else place.flat
    if (cut := place.cut) is None:
        return Slice.whole(elements)
    row = place.rows[:1].nbytes
    return Slice(elements, cut.first * row, cut.whole * row if cut.ends else None)
