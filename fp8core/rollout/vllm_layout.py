"""Where vLLM keeps the tensors that a trainer ships: q, k and v, and gate and up, are rows of one parameter.

A trainer ships weights by their Hugging Face names (`models.weights.stored_weights`). vLLM's names differ by the
fused ones alone. Tensors of scales are laid out as their codes are, one row a tile.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

# vLLM pads the vocabulary to a multiple of this; the rows beyond it are never read.
_VOCABULARY_PADDING = 64
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_WITH = {part: fused for fused, parts in _FUSED.items() for part in parts}


class UpdateError(RuntimeError):
    """Tensors that do not fit the parameters of the engine."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype (without `torch.`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Slot:
    """Rows `start` to `stop` of a parameter."""

    parameter: str
    start: int
    stop: int


def find_slots(shipped: Mapping[str, TensorSpec]) -> dict[str, Slot]:
    """The place of every shipped tensor, by name.

    Raises:
        UpdateError: a part of a fused parameter is missing.
    """
    slots = {}
    for name, spec in shipped.items():
        before, _, after = _split(name)
        start = 0
        for part in before:
            if part not in shipped:
                raise UpdateError(f"{part} is missing, {name} was sent")
            start += shipped[part].shape[0]
        slots[name] = Slot(after, start, start + spec.shape[0])
    return slots


def _split(name: str) -> tuple[list[str], str, str]:
    """Names of the tensors above this one in its parameter, the name itself, and that of the parameter."""
    prefix, _, rest = name.rpartition(".")
    stem, _, module = prefix.rpartition(".")
    fused = _FUSED_WITH.get(module)
    if fused is None:
        return [], name, name
    parts = _FUSED[fused]
    above = [f"{stem}.{part}.{rest}" for part in parts[: parts.index(module)]]
    return above, name, f"{stem}.{fused}.{rest}"


def check_fit(
    shipped: Mapping[str, TensorSpec], slots: Mapping[str, Slot], parameters: Mapping[str, TensorSpec]
) -> None:
    """Every tensor must fit its slot, and together they must fill every parameter.

    Raises:
        UpdateError: naming the first tensor or parameter that does not.
    """
    filled: dict[str, int] = defaultdict(int)
    for name, slot in slots.items():
        sent, held = shipped[name], parameters.get(slot.parameter)
        if held is None:
            raise UpdateError(f"{name}: the engine has no parameter {slot.parameter}")
        if sent.dtype != held.dtype or sent.shape[1:] != held.shape[1:] or slot.stop > held.shape[0]:
            raise UpdateError(f"{name}: {sent} was sent for rows from {slot.start} of {slot.parameter}, {held}")
        filled[slot.parameter] += slot.stop - slot.start
    for parameter, spec in parameters.items():
        rows = filled[parameter]
        padding = -rows % _VOCABULARY_PADDING if parameter in _VOCABULARY and rows else 0
        if rows + padding != spec.shape[0]:
            raise UpdateError(f"{parameter}: {rows} of its {spec.shape[0]} rows were sent")
