"""The policy in an engine's own process: the requests of `ResidentEngine` to the model that generates.

Arguments and results are plain values. Weights are written in place, and read back from where they lie.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fp8core.numerics.fingerprint import LaneSums, Slice, slice_sums, sums_reader
from fp8core.rollout.shared_weights import SharedBytes, SharedWeights, TensorSpec, open_weights
from fp8core.rollout.slots import Cut, Share, Shares, Slot, rows_of

# A copy of its own costs a processor as long as this takes to copy; smaller ones are launched together.
_LARGE_BYTES = 4 << 20


class _Run(NamedTuple):
    """Bytes that lie in a parameter as they lie in a storage: tensors that are neighbours in both are copied as one."""

    parameter: int
    start: int
    storage: int
    first: int
    bytes: int


class WeightPlaces:
    """The places of all shipped tensors in a model's parameters, found once: experts are tens of thousands."""

    def __init__(self, parameters: Mapping[str, Tensor], share: Share) -> None:
        own = {slot.parameter: parameters[slot.parameter].data for slot, _ in share.values()}
        self._addresses = {name: parameter.data_ptr() for name, parameter in own.items()}
        self._filled_up = [own[name] for name in {slot.parameter for slot, _ in share.values() if slot.filled_up}]
        self._share = [(own[slot.parameter], slot, cut) for slot, cut in share.values()]
        self._numbers = {name: number for number, name in enumerate(share)}
        contiguous = {name: parameter for name, parameter in own.items() if parameter.is_contiguous()}
        self._flat = [parameter.view(-1).view(torch.uint8) for parameter in contiguous.values()]
        rows = {
            name: (number, parameter.nbytes // max(1, len(rows_of(parameter))))
            for number, (name, parameter) in enumerate(contiguous.items())
        }
        # int64 [tensors, 5]: parameter, first byte in it, bytes, bytes of the tensor before them and of all of it. The
        # parameter is -1 where the bytes are not consecutive.
        self._table = np.array(
            [_place_of(slot, cut, *rows.get(slot.parameter, (-1, 0))) for slot, cut in share.values()]
        )
        # Slices are read in place; the rest is not.
        slices = dict[int, Slice]()
        for number, (place, (_, _, cut)) in enumerate(zip(self._table.tolist(), self._share, strict=True)):
            parameter, first, size, before, whole = place
            if parameter >= 0 and (cut is None or not cut.is_gathered):
                elements = self._flat[parameter][first : first + size]
                slices[number] = Slice(elements, before, whole if cut is None or cut.ends else None)
        self._in_place = list(slices)
        self._read = sums_reader(*zip(*slices.values(), strict=True)) if slices else None
        self._rest = [number for number in range(len(share)) if number not in slices]
        # Of what was written last: the policies of a training have one layout.
        self._layout: tuple[list[str], bytes] = [], b""
        self._runs: list[_Run] = []
        self._apart: list[int] = []

    def clear_filling(self) -> None:
        for parameter in self._filled_up:
            parameter.view(torch.uint8).zero_()

    def write(self, parameters: Mapping[str, Tensor], received: SharedBytes) -> None:
        self._check_addresses(parameters)
        layout = received.names, received.places.tobytes()
        if layout != self._layout:
            self._find_runs(received)
            self._layout = layout
        targets = list[Tensor]()
        sources = list[Tensor]()
        for run in self._runs:
            target = self._flat[run.parameter][run.start : run.start + run.bytes]
            source = received.storages[run.storage][run.first : run.first + run.bytes]
            if run.bytes >= _LARGE_BYTES:
                target.copy_(source)
            else:
                targets.append(target)
                sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources)
        for i in self._apart:
            parameter, slot, cut = self._share[self._numbers[received.names[i]]]
            storage, first, size = received.places[i].tolist()
            rows = slot.of(parameter)
            shape = list(rows.shape)
            if cut is not None:
                shape[cut.axis] = cut.whole
            whole = received.storages[storage][first : first + size].view(rows.dtype).view(shape)
            rows.copy_(whole if cut is None else cut.of(whole))

    def sums(self, parameters: Mapping[str, Tensor], gather: Callable[[Tensor, int], Tensor]) -> LaneSums:
        """`fingerprint.slice_sums` of every tensor or its part, in the order of the share."""
        self._check_addresses(parameters)
        sums = np.empty((len(self._share), 2), np.int64)
        if self._read is not None:
            sums[self._in_place] = self._read().cpu().numpy()
        for number in self._rest:
            parameter, slot, cut = self._share[number]
            rows = slot.of(parameter)
            part = Slice.whole(rows)
            if cut is not None and cut.is_gathered:
                part = Slice.whole(gather(rows, cut.axis))
            elif cut is not None:
                row = rows[:1].nbytes
                part = Slice(rows, cut.first * row, cut.whole * row if cut.ends else None)
            # One after another: there is no room for all of them.
            (sums[number],) = slice_sums([part])
        return sums

    def _find_runs(self, received: SharedBytes) -> None:
        own = self._table[[self._numbers[name] for name in received.names]]
        self._apart = np.flatnonzero(own[:, 0] < 0).tolist()
        inside = own[:, 2] > 0
        parameter, start, size, before, whole = own[inside].T
        storage, first, sent = received.places[inside].T
        assert (sent == whole).all(), "a tensor has another size than its place"
        order = np.lexsort((start, parameter))
        runs = np.stack([parameter, start, storage, first + before, size], axis=1)[order]
        # The next tensor of both memories begins where this one ends.
        ends = runs[:, :4] + runs[:, 4:] * (0, 1, 0, 1)
        heads = np.flatnonzero(np.append(True, (runs[1:, :4] != ends[:-1]).any(1))[: len(runs)])
        sizes = np.add.reduceat(runs[:, 4], heads) if len(heads) else heads
        runs = np.column_stack([runs[heads, :4], sizes])
        self._runs = [_Run(*run) for run in runs.tolist()]

    def _check_addresses(self, parameters: Mapping[str, Tensor]) -> None:
        for name, address in self._addresses.items():
            assert parameters[name].data_ptr() == address, f"{name} was moved, and captured graphs read what is left"


def _place_of(slot: Slot, cut: Cut | None, parameter: int, row: int) -> tuple[int, ...]:
    """A row of `WeightPlaces._table`; `row`: the bytes of one of the parameter's."""
    if parameter < 0 or slot.columns < slot.width or (cut is not None and cut.axis == 1):
        return -1, 0, 0, 0, 0
    size = (slot.stop - slot.start) * row
    before, whole = (0, size) if cut is None else (cut.first * row, cut.whole * row)
    return parameter, slot.start * row, size, before, whole


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

    def write(self, received: SharedWeights) -> None:
        self._places().write(self._parameters_by_name(), open_weights(received, self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def end(self, version: int) -> None:
        self._version = version

    def set_scales(self, scales: Sequence[Sequence[float]]) -> None:
        self._write_scales(scales)

    def read_back(self) -> dict[str, Any]:
        """Version, the bytes of the lane sums, and the scales in force."""
        sums = self._places().sums(self._parameters_by_name(), self._gather)
        return {"version": self._version, "sums": sums.tobytes(), "scales": self.scales()}

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
