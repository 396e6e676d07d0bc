"""Where the tensors of a whole model come from, so that each process that needs them makes them itself.

A model of 8 billion parameters is 32 GB in FP32: too much to hand from one process to another.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fp8core.numerics.fingerprint import fingerprint

OTHER_START = (
    "a node sees other files, or its processor draws other values than the one that the run began on "
    "(ATEN_CPU_CAPABILITY=default in the environment of all processes makes those of a new run equal)"
)
"""Why two processes make other tensors from one source."""


class TensorSource(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for. Its pickle is small, and gives the same tensors elsewhere."""


class FingerprintedTensors(Mapping[str, Tensor]):
    """Notes what was read: `digest_of` has from `found` the `masters_digest`, once all of it was read."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self.found: dict[str, tuple[str, tuple[int, ...], str]] = {}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name not in self.found:
            self.found[name] = "float32", tuple(tensor.shape), fingerprint(tensor.to(self._device).float())
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
