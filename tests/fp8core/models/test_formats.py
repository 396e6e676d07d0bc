from dataclasses import replace

import pytest
import torch

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.formats import reference_formats, rollout_formats, training_formats
from fp8core.models.weights import LayerNames, StoredNames
from fp8core.numerics.attention import Bf16Attention, Fp8Attention, Fp32Attention
from fp8core.numerics.linear import Bf16Linear, Fp8BlockLinear, Fp8ForwardLinear, Fp32Linear
from fp8core.numerics.logprobs import Bf16Head, Fp32Head
from fp8core.numerics.rounding import keep_fp32


def kinds(formats):
    """The type of each layer's linears, which is one."""
    found = [{type(linear) for linear in layer.linears} for layer in formats.layers]
    assert all(len(types) == 1 for types in found)
    return [types.pop() for types in found]


@pytest.mark.parametrize("formats_of", [rollout_formats, training_formats])
@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 0, "FFFF"), (1, 0, "BFFF"), (0, 2, "FFBB"), (1, 1, "BFFB"), (2, 2, "BBBB")],
)
def test_layers_at_both_ends_stay_in_bf16(formats_of, first, last, expected):
    formats = formats_of(PrecisionContract(bf16_first_layers=first, bf16_last_layers=last), 4)
    assert kinds(formats) == [{"F": Fp8BlockLinear, "B": Bf16Linear}[letter] for letter in expected]
    assert formats.stored_names() == StoredNames.by_layer(
        *({"F": "fp8_block", "B": "bf16"}[letter] for letter in expected)
    )


def test_both_sides_follow_their_part_of_the_contract():
    contract = PrecisionContract(
        rollout=SidePrecision(head="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
    )
    rollout, training = rollout_formats(contract, 2), training_formats(contract, 2)
    assert kinds(rollout) == [Fp8BlockLinear] * 2
    assert kinds(training) == [Bf16Linear] * 2
    assert [type(layer.attention) for layer in rollout.layers] == [Fp8Attention] * 2
    assert [type(layer.attention) for layer in training.layers] == [Bf16Attention] * 2
    assert (type(rollout.head), type(training.head)) == (Bf16Head, Fp32Head)


@pytest.mark.parametrize(
    ("linear", "backward", "expected"),
    [
        ("fp8_block", None, Fp8BlockLinear),
        ("fp8_block", "fp8_block", Fp8BlockLinear),
        ("fp8_block", "bf16", Fp8ForwardLinear),
        ("fp8_block", "fp32", Fp8ForwardLinear),
        ("bf16", None, Bf16Linear),
        ("bf16", "fp32", Bf16Linear),
    ],
)
def test_the_backward_is_the_trainers_alone(linear, backward, expected):
    training = TrainingPrecision(linear=linear, backward=backward)
    contract = PrecisionContract(rollout=SidePrecision(linear=linear), training=training)
    assert kinds(training_formats(contract, 1)) == [expected]
    assert kinds(rollout_formats(contract, 1)) == [Fp8BlockLinear if linear == "fp8_block" else Bf16Linear]
    assert training_formats(contract, 1).stored_names() == rollout_formats(contract, 1).stored_names()


@pytest.mark.parametrize("rule", ["pow2", "fp32"])
def test_the_scale_rule_reaches_every_quantiser(rule):
    formats = training_formats(PrecisionContract(scale_rule=rule), 2)
    assert formats.scale_rule == rule
    assert {linear.rule for layer in formats.layers for linear in layer.linears} == {rule}


def test_the_reference_rounds_nothing_below_fp32():
    formats = reference_formats(3)
    assert kinds(formats) == [Fp32Linear] * 3
    assert formats.stored_names() == StoredNames.by_layer("fp32", "fp32", "fp32")
    assert [type(layer.attention) for layer in formats.layers] == [Fp32Attention] * 3
    assert type(formats.head) is Fp32Head
    assert formats.rounding(torch.tensor(1 + 2**-20)).item() == 1 + 2**-20
    assert {rounding for place, rounding in vars(formats.points).items() if place != "name"} == {keep_fp32}
    assert rollout_formats(PrecisionContract(), 1).rounding(torch.tensor(1 + 2**-20)).item() == 1.0


def test_layers_kept_wide_are_fp32_in_the_reference_mode():
    fp32 = {"linear": "fp32", "kv_cache": "fp32"}
    contract = PrecisionContract(
        rollout=SidePrecision(**fp32), training=TrainingPrecision(**fp32), bf16_first_layers=1, bf16_last_layers=1
    )
    assert kinds(training_formats(contract, 3)) == [Fp32Linear] * 3


def test_each_linear_and_each_attention_has_its_own_format():
    fp8, fp32 = rollout_formats(PrecisionContract(), 2), reference_formats(2)
    layer = replace(fp8.layers[1], output=fp32.layers[1].output, attention=fp32.layers[1].attention)
    mixed = replace(fp8, layers=(fp8.layers[0], layer))
    names = LayerNames(qkv="fp8_block", output="fp32", gate_up="fp8_block", down="fp8_block")
    assert mixed.stored_names().layers == (LayerNames(*["fp8_block"] * 4), names)
    assert mixed.stored_names().values == "bf16"
    assert [type(layer.attention) for layer in mixed.layers] == [Fp8Attention, Fp32Attention]
    assert [type(layer.attention) for layer in mixed.with_attention(Bf16Attention()).layers] == [Bf16Attention] * 2
    assert mixed.with_attention(Bf16Attention()).stored_names() == mixed.stored_names()


@pytest.mark.parametrize("name", ["stepwise", "native", "kernels", "fused"])
def test_rounding_points_reach_values_and_bf16_attention_of_both_sides(name):
    contract = PrecisionContract(rollout=SidePrecision(kv_cache="bf16"), rounding_points=name)
    formats = rollout_formats(contract, 2)
    assert formats.points.name == formats.describe()["rounding_points"] == name
    assert training_formats(contract, 2).points is formats.points
    q = torch.randn(1, 1, 1, 8)
    k = v = torch.randn(1, 1, 5, 8).bfloat16().float()
    expected = Bf16Attention(formats.points.weights)
    stored, mask = expected.store(k, v, None), torch.ones(1, 1, 1, 5, dtype=torch.bool)
    changed = rollout_formats(PrecisionContract(rollout=contract.rollout), 2).with_points(formats.points)
    for form in (formats.layers[1].attention, changed.layers[1].attention):
        assert torch.equal(form.attend(q, *stored, mask, None), expected.attend(q, *stored, mask, None))
