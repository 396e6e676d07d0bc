import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models import weights
from fp8core.numerics.attention import Bf16Attention, Fp16OverFp8Attention, Fp32Attention
from fp8core.numerics.e4m3 import decode, quantise_tiles
from fp8core.numerics.elementwise import keep_fp32
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.linear import Bf16Linear, Fp8BlockLinear, Fp32Linear
from fp8core.numerics.logprobs import BF16_HEAD, FP32_HEAD
from fp8core.numerics.recipe import FP32, POW2

TILES = [POW2.weights, FP32.weights]
FP8, FP8_ONCE = weights.StoredNames.by_layer("fp8_block", "fp8_block"), weights.StoredNames.by_layer("fp8_block")


@pytest.mark.parametrize("tiles", TILES, ids=["pow2", "fp32"])
def test_linears_are_quantised_from_bf16(architecture, masters_of, tiles):
    masters = masters_of(architecture())
    stored = weights.stored_weights(masters, FP8, tiles)
    assert stored.keys() == masters.keys() | {
        name + weights.SCALE_SUFFIX for name in masters if weights.is_linear(name)
    }
    for name, master in masters.items():
        if not weights.is_linear(name):
            assert stored[name].dtype == torch.bfloat16
            assert torch.equal(stored[name], master.bfloat16()), name
            continue
        grid, scales = quantise_tiles(master.bfloat16().float(), tiles)
        assert stored[name].dtype == torch.float8_e4m3fn
        assert torch.equal(decode(stored[name]), grid), name
        assert torch.equal(stored[name + weights.SCALE_SUFFIX], scales), name
        assert scales.shape == tuple(-(-size // 128) for size in master.shape)


@given(seed=st.integers(0, 2**31), spread=st.floats(-20, 10).map(lambda e: 2.0**e), tiles=st.sampled_from(TILES))
@settings(max_examples=15)
def test_a_bf16_checkpoint_quantises_to_the_same_bytes(architecture, masters_of, seed, spread, tiles):
    masters = {name: spread * tensor for name, tensor in masters_of(architecture(num_layers=1), seed).items()}
    checkpoint = {name: tensor.bfloat16() for name, tensor in masters.items()}
    shipped = weights.stored_weights(masters, FP8_ONCE, tiles)
    assert policy_digest(weights.stored_weights(checkpoint, FP8_ONCE, tiles)) == policy_digest(shipped)


def test_ready_weights_are_the_stored_values_times_their_tile_scales(architecture, masters_of):
    """gate_proj ends inside a row of tiles (160 rows); the tiles of up_proj begin anew after it."""
    arch = architecture(hidden_size=144)
    stored = weights.stored_weights(masters_of(arch), FP8, POW2.weights)
    layer = weights.load_policy(arch, stored).layers[1]
    groups = {"qkv": "q_proj k_proj v_proj", "output": "o_proj", "gate_up": "gate_proj up_proj", "down": "down_proj"}
    for field, names in groups.items():
        expected = []
        for name in names.split():
            part = "mlp" if name[0] in "gud" else "self_attn"
            key = f"model.layers.1.{part}.{name}.weight"
            values, scales = stored[key].double(), stored[key + weights.SCALE_SUFFIX].double()
            tiles = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected.append(values * tiles[: values.shape[0], : values.shape[1]])
        ready = getattr(layer.mlp if field in ("gate_up", "down") else layer, field)
        assert torch.equal(ready.dequantised, torch.cat(expected)), field


def kinds(formats):
    return [type(linear) for linear in formats.linears]


@pytest.mark.parametrize("formats_of", [weights.rollout_formats, weights.training_formats])
@pytest.mark.parametrize(
    ("first", "last", "expected"), [(0, 0, "FFFF"), (1, 0, "BFFF"), (0, 2, "FFBB"), (1, 1, "BFFB"), (2, 2, "BBBB")]
)
def test_layers_at_both_ends_stay_in_bf16(formats_of, first, last, expected):
    formats = formats_of(PrecisionContract(bf16_first_layers=first, bf16_last_layers=last), 4)
    assert kinds(formats) == [{"F": Fp8BlockLinear, "B": Bf16Linear}[letter] for letter in expected]
    assert formats.stored_names() == weights.StoredNames.by_layer(
        *({"F": "fp8_block", "B": "bf16"}[letter] for letter in expected)
    )


def test_both_sides_follow_their_part_of_the_contract():
    contract = PrecisionContract(
        rollout=SidePrecision(head="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
    )
    rollout, training = weights.rollout_formats(contract, 2), weights.training_formats(contract, 2)
    assert kinds(rollout) == [Fp8BlockLinear] * 2
    assert kinds(training) == [Bf16Linear] * 2
    assert type(rollout.attention) is Fp16OverFp8Attention
    assert type(training.attention) is Bf16Attention
    assert (rollout.head, training.head) == (BF16_HEAD, FP32_HEAD)


def test_the_reference_rounds_nothing_below_fp32():
    formats = weights.reference_formats(3)
    assert kinds(formats) == [Fp32Linear] * 3
    assert formats.stored_names() == weights.StoredNames.by_layer("fp32", "fp32", "fp32")
    assert type(formats.attention) is Fp32Attention
    assert formats.head == FP32_HEAD
    assert formats.rounding(torch.tensor(1 + 2**-20)).item() == 1 + 2**-20
    assert {rounding for place, rounding in vars(formats.points).items() if place != "name"} == {keep_fp32}
    assert weights.rollout_formats(PrecisionContract(), 1).rounding(torch.tensor(1 + 2**-20)).item() == 1.0
