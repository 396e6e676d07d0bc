"""Find the part of a model that makes the log-probs of two precisions differ.

Two sides score the same tokens: A, the reference, and B, the suspect. A side is formats and weights. A decoder is cut
into places that B may differ in, and a unit is a set of places:

| unit              | places                                                             |
|-------------------|--------------------------------------------------------------------|
| layer 3           | the five operations of that layer                                  |
| all down          | that operation in every layer                                      |
| layer 3 down      | one place                                                          |
| values            | the rounding of what lies between operations                       |
| embedding         | the embedding's weight (with tied embeddings the head's too)       |
| head              | the final norm, and format and weight of the output head           |

Operations are qkv, attention (with its cache), output, gate_up and down. A norm belongs to the linear that reads it:
input norm and those of Q and K to qkv, post-attention norm to gate_up. The router of experts belongs to gate_up.

Each unit is measured twice, because neither answer implies the other (docs/guides/bisect.md):

    alone    error of A with this unit taken from B, against A; its share is alone / total
    without  error of B with this unit taken from A, against A; the share removed is 1 - without / total
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder
from fp8core.models.weights import (
    SCALE_SUFFIX,
    Formats,
    PreparedWeights,
    fused_linear,
    is_linear,
    layer_of,
    load_policy,
    stored_weights,
)
from fp8core.numerics.kv_scales import LayerScales
from fp8core.progress import tell_progress
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.batch import TokenBatch

Operation = Literal["qkv", "attention", "output", "gate_up", "down"]
Granularity = Literal["layer", "operation", "both"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_OUTSIDE = ("values", "embedding", "head")
_MICRO_BATCH = 64


@dataclass(frozen=True, order=True)
class DecoderPart:
    """An operation of a layer; -1 is outside the layers, where parts are values, embedding and head."""

    layer: int
    part: str


@dataclass(frozen=True)
class Unit:
    name: str
    places: frozenset[DecoderPart]


@dataclass(frozen=True)
class Side:
    """One way to compute the policy: formats, and stored weights that fit them (`models.weights.stored_weights`)."""

    formats: Formats
    stored: Mapping[str, Tensor]

    @classmethod
    def of(cls, formats: Formats, masters: Mapping[str, Tensor]) -> "Side":
        return cls(formats, stored_weights(masters, formats.stored_names(), formats.recipe.weights))


@dataclass(frozen=True)
class Task:
    """Tokens that both sides score, with the same scales of Q, K and V per layer; none when no attention is FP8."""

    sequences: TokenBatch
    temperature: float
    scales: Sequence[LayerScales]


@dataclass(frozen=True)
class LogprobDistance:
    """Mean |d|, mean exp |d| and max |d|, with d = log p_side - log p_A in nats per completion token."""

    mean: float
    mult_prob_error: float
    largest: float


@dataclass(frozen=True)
class UnitError:
    unit: str
    alone: LogprobDistance
    without: LogprobDistance
    share: float
    removed: float


@dataclass(frozen=True)
class Bisection:
    """The error of B against A over `tokens`, and its units, largest share first; none where both sides agree."""

    tokens: int
    total: LogprobDistance
    units: tuple[UnitError, ...]


def bisect(arch: Architecture, reference: Side, suspect: Side, task: Task, units: Sequence[Unit]) -> Bisection:
    """Measure every unit alone and taken out; 2 passes a unit and 2 more."""
    baseline = logprobs(arch, reference, task)

    def error(side: Side) -> LogprobDistance:
        return _error(logprobs(arch, side, task), baseline, task.sequences)

    total = error(suspect)
    tokens = int(task.sequences.completion.sum())
    if total.largest == 0:
        return Bisection(tokens, total, ())
    measured = []
    for number, unit in enumerate(units):
        tell_progress(number, len(units))
        alone, without = error(mixed(reference, suspect, unit.places)), error(mixed(suspect, reference, unit.places))
        measured.append(
            UnitError(unit.name, alone, without, alone.mean / total.mean, removed=1 - without.mean / total.mean)
        )
    return Bisection(tokens, total, tuple(sorted(measured, key=lambda unit: (-unit.share, -unit.removed))))


def units_of(arch: Architecture, granularity: Granularity) -> list[Unit]:
    layers, outside = range(arch.num_layers), [_unit(part, DecoderPart(-1, part)) for part in _OUTSIDE]
    match granularity:
        case "layer":
            units = [_unit(f"layer {i}", *(DecoderPart(i, part) for part in OPERATIONS)) for i in layers]
        case "operation":
            units = [_unit(f"all {part}", *(DecoderPart(i, part) for i in layers)) for part in OPERATIONS]
        case "both":
            units = [_unit(f"layer {i} {part}", DecoderPart(i, part)) for i in layers for part in OPERATIONS]
    return units + outside


def mixed(base: Side, other: Side, places: frozenset[DecoderPart]) -> Side:
    return Side(
        formats=_mixed_formats(base.formats, other.formats, places),
        stored={name: tensor for name, tensor in other.stored.items() if place_of(name) in places}
        | {name: tensor for name, tensor in base.stored.items() if place_of(name) not in places},
    )


def place_of(parameter: str) -> DecoderPart:
    """The place whose flip takes a parameter along, by its Hugging Face name (tile scales go with their weight)."""
    name = parameter.removesuffix(SCALE_SUFFIX)
    layer = layer_of(name)
    if layer is None:
        return DecoderPart(-1, "embedding" if name == "model.embed_tokens.weight" else "head")
    if is_linear(name) or name.endswith(".bias"):
        return DecoderPart(layer, fused_linear(name))
    reader = {"input_layernorm": "qkv", "q_norm": "qkv", "k_norm": "qkv", "post_attention_layernorm": "gate_up"}
    return DecoderPart(layer, {**reader, "gate": "gate_up"}[name.split(".")[-2]])


@torch.no_grad()
def logprobs(arch: Architecture, side: Side, task: Task) -> Tensor:
    """Log-probs of the completion tokens of one side, FP32 [B, T - 1] in the columns of the tokens; 0 elsewhere."""
    decoder = Decoder(arch, side.formats)
    weights = load_policy(arch, PreparedWeights(side.stored, side.formats.recipe.weights))
    found = []
    for _, part in task.sequences.slices(_MICRO_BATCH):
        found.append(decoder.completion_logprobs(weights, part, task.temperature, task.scales)[0])
    mask = task.sequences.completion[:, 1:]
    return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(found))


def _unit(name: str, *places: DecoderPart) -> Unit:
    return Unit(name, frozenset(places))


def _mixed_formats(base: Formats, other: Formats, places: frozenset[DecoderPart]) -> Formats:
    layers = []
    for i, (own, others) in enumerate(zip(base.layers, other.layers, strict=True)):
        parts = [place.part for place in places if place.layer == i]
        layers.append(replace(own, **{part: getattr(others, part) for part in parts}))
    return replace(
        base,
        layers=tuple(layers),
        head=other.head if DecoderPart(-1, "head") in places else base.head,
        rounding=other.rounding if DecoderPart(-1, "values") in places else base.rounding,
        points=other.points if DecoderPart(-1, "values") in places else base.points,
    )


def _error(side: Tensor, baseline: Tensor, sequences: TokenBatch) -> LogprobDistance:
    metrics = alignment_metrics(side, baseline, sequences.completion[:, 1:])
    return LogprobDistance(
        mean=metrics["logprob_abs_diff"],
        mult_prob_error=metrics["token_mult_prob_error"],
        largest=metrics["logprob_abs_diff_max"],
    )
