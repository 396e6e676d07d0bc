"""Where vLLM and SGLang keep the tensors that a trainer ships.

The engines' names differ from those of a checkpoint by the fused ones alone: q, k and v, gate and up are rows of one.
vLLM's experts of a layer are two parameters [experts, rows, columns], w13 with gate above up, and w2 with down.
Tensors of scales are laid out as their codes are, one row a tile. The aligned model has zeros where a part is not made
of whole tiles of block FP8 (`architecture.with_whole_tiles`).

GPUs that share a layer of vLLM (tensor parallelism) each hold rows of every part of a fused parameter, and of the
vocabulary. Of o_proj and down_proj they hold columns in vLLM's own models, and rows in the aligned model, so that one
GPU adds a whole sum. Each expert is cut likewise. All hold norms and routers.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fp8core.models.architecture import Architecture, padded_vocabulary, with_whole_tiles
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import SCALE_SUFFIX
from fp8core.numerics.fingerprint import WORD_BYTES
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import TILE
from fp8core.rollout.shared_weights import TensorSpec

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linears of both engines -> the linears of a checkpoint that are their rows, from the top."""
_FUSED_WITH = {part: fused for fused, parts in FUSED.items() for part in parts}
_LAST = ("o_proj", "down_proj")
_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight.*)")
_EXPERTS = ".routed_experts."
# Part of an expert -> the parameter, how many parts an expert has in it, and which of them this is.
_EXPERT_PARTS = {"gate": ("w13", 2, 0), "up": ("w13", 2, 1), "down": ("w2", 1, 0)}


class EngineUpdateError(RuntimeError):
    """Tensors do not fit the parameters of an engine, or it kept older ones."""


class Slot(NamedTuple):
    """Rows `start` to `stop` of a parameter (`rows_of`), and of their `width` the first `columns`.

    Rows from `stop` to `end` are zeros, and the other columns. A vector has no columns: both are 0.
    """

    parameter: str
    start: int
    stop: int
    end: int
    columns: int
    width: int

    @property
    def filled_up(self) -> bool:
        return self.stop < self.end or self.columns < self.width

    def of(self, parameter: Tensor) -> Tensor:
        rows = rows_of(parameter)[self.start : self.stop]
        return rows if self.columns == self.width else rows[:, : self.columns]


class Cut(NamedTuple):
    """The part of a shipped tensor on one of the GPUs that share its layer: `size` of `whole` rows (axis 0) or columns.

    `is_gathered`: whether GPUs must put it together for its fingerprint, which sums over consecutive whole words.
    """

    axis: int
    first: int
    size: int
    whole: int
    is_gathered: bool

    @property
    def ends(self) -> bool:
        return 0 < self.size == self.whole - self.first

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.first, self.size)


# The axis that o_proj and down_proj are cut along: 0 for rows, 1 for columns.
Axis = Literal[0, 1]


def find_cuts(specs: Mapping[str, TensorSpec], rank: int, ranks: int, last: Axis) -> dict[str, Cut]:
    cuts = {}
    for name, spec in specs.items():
        if ranks > 1 and (axis := _cut_axis(name, last)) is not None:
            rows = spec.shape[axis]
            each = padded_vocabulary(rows) // ranks if name in _VOCABULARY else rows // ranks
            size = min(each, max(0, rows - rank * each))
            is_gathered = axis == 1 or each * (spec.bytes // rows) % WORD_BYTES > 0
            cuts[name] = Cut(axis, min(rank * each, rows), size, rows, is_gathered)
    return cuts


def cut_specs(specs: Mapping[str, TensorSpec], cuts: Mapping[str, Cut]) -> dict[str, TensorSpec]:
    return {
        name: spec._replace(shape=(*spec.shape[: cut.axis], cut.size, *spec.shape[cut.axis + 1 :]))
        if (cut := cuts.get(name)) is not None
        else spec
        for name, spec in specs.items()
    }


def whole_parameters(parameters: Mapping[str, TensorSpec], ranks: int, last: Axis) -> dict[str, TensorSpec]:
    specs = {}
    for name, spec in parameters.items():
        shape = list(spec.shape)
        # The aligned model alone shares experts: a GPU has rows of each.
        axis = 1 if _EXPERTS in name else _cut_axis(name, last)
        if axis is not None:
            shape[axis] *= ranks
        specs[name] = spec._replace(shape=tuple(shape))
    return specs


def _cut_axis(name: str, last: Axis) -> Axis | None:
    module = name.rsplit(".", 2)[-2]
    if name in _VOCABULARY or module in FUSED or module in _FUSED_WITH:
        return 0
    return last if module in _LAST else None


# The slot of each shipped tensor on one GPU, and its cut where it has one.
Share = dict[str, tuple[Slot, Cut | None]]
# The fields of both, for every GPU: what travels to the engine's workers.
Shares = list[dict[str, list[list[Any]]]]


def find_shares(
    specs: Mapping[str, TensorSpec],
    tile_shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, TensorSpec],
    ranks: int = 1,
    last: Axis = 1,
) -> list[Share]:
    """The share of each GPU; `parameters` are those of one. `tile_shapes`: shapes of what has zeros beside it.

    Raises EngineUpdateError: what is shipped does not fit.
    """
    check_fit(specs, find_slots(specs, tile_shapes), whole_parameters(parameters, ranks, last))
    shares = []
    for rank in range(ranks):
        cuts = find_cuts(specs, rank, ranks, last)
        slots = find_slots(cut_specs(specs, cuts), tile_shapes)
        shares.append({name: (slot, cuts.get(name)) for name, slot in slots.items()})
    return shares


def written_scales(layers: Sequence[Sequence[float]]) -> tuple[LayerScales, ...]:
    """Raises EngineUpdateError: a scale is NaN, or no positive number."""
    for layer, values in enumerate(layers):
        for name, value in zip("qkv", values, strict=True):
            if isnan(value):
                raise EngineUpdateError(f"layer {layer}: its scale of {name} was never written, or not everywhere")
            if not 0 < value < inf:
                raise EngineUpdateError(f"layer {layer}: its scale of {name} was read back as {value}")
    return tuple(LayerScales(*values) for values in layers)


def rows_of(parameter: Tensor) -> Tensor:
    """Experts below one another, everything else as it is."""
    return parameter.view(-1, parameter.shape[-1]) if parameter.dim() > 2 else parameter


def filled_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that the aligned model pads with zeros."""
    own = parameter_shapes(arch)
    return {name: shape for name, shape in parameter_shapes(with_whole_tiles(arch)).items() if shape != own[name]}


def find_slots(specs: Mapping[str, TensorSpec], tile_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
    """Raises EngineUpdateError: a part of a fused parameter is missing."""
    slots = {}

    def room(name: str) -> tuple[int, ...]:
        if name.endswith(SCALE_SUFFIX) and (shape := tile_shapes.get(name.removesuffix(SCALE_SUFFIX))) is not None:
            return tuple(-(-size // TILE) for size in shape)
        return tile_shapes.get(name, specs[name].shape)

    for name, spec in specs.items():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            slots[name] = _expert_slot(expert, spec.rows)
            continue
        before, after = _split(name)
        start = 0
        for part in before:
            if part not in specs:
                raise EngineUpdateError(f"{part} is missing, {name} was sent")
            start += room(part)[0]
        (rows, *columns), (taken, *width) = spec.shape, room(name)
        slots[name] = Slot(after, start, start + rows, start + taken, *(columns or (0,)), *(width or (0,)))
    return slots


def _expert_slot(name: re.Match[str], rows: int) -> Slot:
    parameter, parts, part = _EXPERT_PARTS[name["part"]]
    start = (int(name["index"]) * parts + part) * rows
    stop = start + rows
    return Slot(f"{name['experts']}{_EXPERTS}{parameter}_{name['kind']}", start, stop, stop, 0, 0)


def _split(name: str) -> tuple[list[str], str]:
    prefix, _, rest = name.rpartition(".")
    stem, _, module = prefix.rpartition(".")
    fused_name = _FUSED_WITH.get(module)
    if fused_name is None:
        return [], name
    parts = FUSED[fused_name]
    above = [f"{stem}.{part}.{rest}" for part in parts[: parts.index(module)]]
    return above, f"{stem}.{fused_name}.{rest}"


def check_fit(specs: Mapping[str, TensorSpec], slots: Mapping[str, Slot], parameters: Mapping[str, TensorSpec]) -> None:
    """Raises EngineUpdateError: a tensor does not fit its slot, or together they do not fill a parameter."""
    intervals: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, slot in slots.items():
        source = specs[name]
        target = parameters.get(slot.parameter)
        if target is None:
            raise EngineUpdateError(f"{name}: the engine has no parameter {slot.parameter}")
        row = source.row if slot.columns == slot.width else (slot.width,)
        if source.dtype != target.dtype or row != target.row or slot.end > target.rows:
            raise EngineUpdateError(
                f"{name}: {source} was sent for rows from {slot.start} of {slot.parameter}, {target}"
            )
        intervals[slot.parameter].append((slot.start, slot.end))
    for parameter, spec in parameters.items():
        rows = _rows_without_gap(parameter, intervals[parameter])
        if (padded_vocabulary(rows) if parameter in _VOCABULARY and rows else rows) != spec.rows:
            raise EngineUpdateError(f"{parameter}: {rows} of its {spec.rows} rows were sent")


def _rows_without_gap(parameter: str, slots: list[tuple[int, int]]) -> int:
    end = 0
    for start, stop in sorted(slots):
        if start != end:
            fault = "missing" if start > end else "sent twice"
            raise EngineUpdateError(f"{parameter}: rows from {min(start, end)} to {max(start, end)} are {fault}")
        end = stop
    return end
