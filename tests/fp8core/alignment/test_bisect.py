from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fp8core.alignment.bisect import OPERATIONS, DecoderPart, Side, Task, bisect, logprobs, mixed, place_of, units_of
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.architecture import Architecture, Experts, parameter_shapes
from fp8core.models.weights import SCALE_SUFFIX, reference_formats, rollout_formats
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.alignment_metrics import alignment_metrics
from fp8core.rl.batch import TokenBatch

FP8 = PrecisionContract()
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
GRANULARITIES = ("layer", "operation", "both")


@dataclass(frozen=True)
class Case:
    """One policy, random tokens, and both sides."""

    arch: Architecture
    masters: dict[str, Tensor]
    bf16: Side
    fp8: Side
    task: Task


@pytest.fixture(scope="module")
def case(architecture, masters_of, ragged_prompts):
    arch = architecture()
    masters = masters_of(arch)
    sequences = TokenBatch.of(ragged_prompts(9, 40), ragged_prompts(9, 40, seed=1, longest=7))
    bf16, fp8 = (Side.of(rollout_formats(contract, 2), masters) for contract in (BF16, FP8))
    task = Task(sequences, 0.8, [LayerScales(q=2**-6, k=2**-6, v=2**-5)] * 2)
    return Case(arch, masters, bf16, fp8, task)


def damaged(side, name, factor=1.5):
    """The side with one stored tensor multiplied."""
    return replace(side, stored={**side.stored, name: (side.stored[name].float() * factor).to(side.stored[name].dtype)})


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_units_cover_every_parameter_and_operation_once(architecture, granularity, family):
    experts = Experts(count=3, per_token=2, intermediate_size=16, normalise_top_k=True, sparse_step=2, dense_layers=())
    arch = architecture(family=family, num_layers=3, experts=experts if family == "qwen3_moe" else None)
    places = [place for unit in units_of(arch, granularity) for place in unit.places]
    operations = {DecoderPart(layer, part) for layer in range(3) for part in OPERATIONS}
    assert len(places) == len(set(places))
    assert set(places) == operations | {DecoderPart(-1, part) for part in ("values", "embedding", "head")}
    assert {place_of(name) for name in parameter_shapes(arch)} <= set(places)


def test_flipping_every_unit_makes_the_other_side(case):
    reference = Side.of(reference_formats(2), case.masters)
    everything = frozenset(place for unit in units_of(case.arch, "layer") for place in unit.places)
    expected = logprobs(case.arch, case.fp8, case.task)
    assert torch.equal(logprobs(case.arch, mixed(reference, case.fp8, everything), case.task), expected)
    assert torch.equal(logprobs(case.arch, mixed(case.fp8, reference, frozenset()), case.task), expected)
    assert not torch.equal(logprobs(case.arch, reference, case.task), expected)


@pytest.mark.parametrize("contract", [FP8, BF16])
def test_logprobs_are_those_of_the_trainer(case, trainer_of, contract):
    trainer = trainer_of(contract, case.arch, masters=case.masters)
    expected = trainer.logprobs(case.task.sequences, case.task.temperature, case.task.scales).logprobs
    side = case.fp8 if contract is FP8 else case.bf16
    written = case.task.sequences.completion
    found = logprobs(case.arch, side, case.task)[written[:, 1:]]
    assert torch.equal(found, expected[torch.arange(expected.shape[1]) < written.sum(1, keepdim=True)])


def test_a_unit_alone_is_a_decoder_with_that_format_in_that_place(case):
    """Against formats and weights that are put together by hand."""
    layers = list(case.bf16.formats.layers)
    layers[1] = replace(layers[1], down=case.fp8.formats.layers[1].down)
    by_hand = Side.of(replace(case.bf16.formats, layers=tuple(layers)), case.masters)
    assert {name.split(".")[2:5:2] == ["1", "down_proj"] for name in by_hand.stored if SCALE_SUFFIX in name} == {True}
    mask = case.task.sequences.completion[:, 1:]
    pair = (logprobs(case.arch, side, case.task) for side in (by_hand, case.bf16))
    expected = alignment_metrics(*pair, mask)
    result = bisect(case.arch, case.bf16, case.fp8, case.task, units_of(case.arch, "both"))
    (found,) = (unit for unit in result.units if unit.unit == "layer 1 down")
    assert found.alone.mean == expected["logprob_abs_diff"] > 0
    assert found.alone.mult_prob_error == expected["token_mult_prob_error"] > 1
    assert found.alone.largest == expected["logprob_abs_diff_max"] > found.alone.mean
    assert found.share == found.alone.mean / result.total.mean
    assert found.removed == 1 - found.without.mean / result.total.mean


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [
        ("model.layers.0.self_attn.v_proj.weight", "layer 0 qkv"),
        ("model.layers.0.self_attn.q_norm.weight", "layer 0 qkv"),
        ("model.layers.1.self_attn.o_proj.weight" + SCALE_SUFFIX, "layer 1 output"),
        ("model.layers.1.mlp.up_proj.weight", "layer 1 gate_up"),
        ("model.layers.0.mlp.down_proj.weight" + SCALE_SUFFIX, "layer 0 down"),
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "head"),
    ],
)
def test_a_wrong_weight_is_the_whole_error_of_its_unit_and_of_no_other(case, parameter, unit):
    result = bisect(case.arch, case.fp8, damaged(case.fp8, parameter), case.task, units_of(case.arch, "both"))
    first, *others = result.units
    assert (first.unit, first.share, first.removed) == (unit, 1.0, 1.0)
    assert first.alone == result.total
    assert first.without.largest == 0
    assert {(other.share, other.removed) for other in others} == {(0.0, 0.0)}


def test_equal_sides_have_nothing_to_rank(case):
    result = bisect(case.arch, case.fp8, case.fp8, case.task, units_of(case.arch, "layer"))
    assert result.units == ()
    assert (result.total.mean, result.total.mult_prob_error, result.total.largest) == (0.0, 1.0, 0.0)
