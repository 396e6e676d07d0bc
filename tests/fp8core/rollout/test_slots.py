"""Slots of shipped tensors, and tensors through a file; those of a GPU are tested with vLLM itself (tests/vllm)."""

import math
from pathlib import Path

import pytest
import torch

from fp8core.config.precision import PrecisionContract
from fp8core.models.families import parameter_shapes
from fp8core.models.weights import SCALE_SUFFIX, rollout_formats, stored_weights
from fp8core.numerics.fingerprint import combine_sums, fingerprints
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.recipe import POW2
from fp8core.rollout.shared_weights import TensorSpec, open_weights, share_weights, specs_of
from fp8core.rollout.slots import (
    EngineUpdateError,
    Slot,
    check_fit,
    cut_specs,
    filled_shapes,
    find_cuts,
    find_shares,
    find_slots,
    whole_parameters,
    written_scales,
)
from fp8core.rollout.worker_policy import WeightPlaces

LAYER = "model.layers.0"


@pytest.fixture
def shipped(architecture):
    """A decoder in block FP8: 512, 256 and 256 rows of q, k and v; 384 of gate and of up."""
    arch = architecture(
        hidden_size=256,
        intermediate_size=384,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        num_layers=1,
        vocab_size=200,
        family="qwen2",
    )
    specs = {}
    for name, shape in parameter_shapes(arch).items():
        quantised = name.endswith("_proj.weight")
        specs[name] = TensorSpec("float8_e4m3fn" if quantised else "bfloat16", shape)
        if quantised:
            specs[name + SCALE_SUFFIX] = TensorSpec("float32", (shape[0] // 128, shape[1] // 128))
    return specs


@pytest.fixture
def parameters(shipped):
    """The same as vLLM holds it."""
    fused = {
        name: spec
        for name, spec in shipped.items()
        if not any(f"{part}_proj" in name for part in "qkv")
        if "gate_proj" not in name and "up_proj" not in name
    }
    fused[f"{LAYER}.self_attn.qkv_proj.weight"] = TensorSpec("float8_e4m3fn", (1024, 256))
    fused[f"{LAYER}.self_attn.qkv_proj.bias"] = TensorSpec("bfloat16", (1024,))
    fused[f"{LAYER}.self_attn.qkv_proj.weight_scale_inv"] = TensorSpec("float32", (8, 2))
    fused[f"{LAYER}.mlp.gate_up_proj.weight"] = TensorSpec("float8_e4m3fn", (768, 256))
    fused[f"{LAYER}.mlp.gate_up_proj.weight_scale_inv"] = TensorSpec("float32", (6, 2))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        fused[name] = TensorSpec("bfloat16", (256, 256))
    return fused


def test_parts_lie_below_one_another(shipped):
    slots = find_slots(shipped, {})
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    assert slots[f"{attention}.q_proj.weight"] == Slot(f"{attention}.qkv_proj.weight", 0, 512, 512, 256, 256)
    assert slots[f"{attention}.k_proj.weight"] == Slot(f"{attention}.qkv_proj.weight", 512, 768, 768, 256, 256)
    assert slots[f"{attention}.v_proj.weight"] == Slot(f"{attention}.qkv_proj.weight", 768, 1024, 1024, 256, 256)
    assert slots[f"{attention}.k_proj.bias"] == Slot(f"{attention}.qkv_proj.bias", 512, 768, 768, 0, 0)
    assert slots[f"{mlp}.up_proj.weight"] == Slot(f"{mlp}.gate_up_proj.weight", 384, 768, 768, 256, 256)


def test_parts_that_are_not_whole_tiles_have_zeros_after_them(architecture, masters_of):
    """What is written lies where a decoder with the zeros has it, and reads back as it was shipped."""
    partial = architecture(
        hidden_size=192, intermediate_size=336, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=64
    )
    names = rollout_formats(PrecisionContract(), partial.num_layers).stored_names()
    sent = stored_weights(masters_of(partial), names, POW2.weights)
    slots = find_slots(specs_of(sent), filled_shapes(partial))
    held = {}
    for name, slot in slots.items():
        rows = max(each.end for each in slots.values() if each.parameter == slot.parameter)
        held[slot.parameter] = torch.zeros(rows, *[slot.width] * (slot.width > 0), dtype=sent[name].dtype)
    assert tuple(held[f"{LAYER}.self_attn.qkv_proj.weight"].shape) == (768 + 2 * 256, 192)
    assert tuple(held[f"{LAYER}.mlp.down_proj.weight_scale_inv"].shape) == (2, 3)
    check_fit(specs_of(sent), slots, specs_of(held))
    for name, tensor in sent.items():
        slots[name].of(held[slots[name].parameter]).copy_(tensor)
    for name, tensor in sent.items():
        assert torch.equal(slots[name].of(held[slots[name].parameter]).float(), tensor.float()), name
    written = sum(int(tensor.float().count_nonzero()) for tensor in held.values())
    assert written == sum(int(tensor.float().count_nonzero()) for tensor in sent.values()), "parts overlap"


def test_a_whole_policy_fits(shipped, parameters):
    check_fit(shipped, find_slots(shipped, {}), parameters)


def _refused(shipped, parameters, complaint):
    with pytest.raises(EngineUpdateError, match=complaint):
        check_fit(shipped, find_slots(shipped, {}), parameters)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", "self_attn.q_proj.weight is missing, .*k_proj.weight was sent"),
        (f"{LAYER}.self_attn.v_proj.weight", r"qkv_proj.weight: 768 of its 1024 rows were sent"),
        ("lm_head.weight", "lm_head.weight: 0 of its 256 rows were sent"),
    ],
)
def test_a_missing_tensor_is_named(shipped, parameters, missing, complaint):
    del shipped[missing]
    _refused(shipped, parameters, complaint)


@pytest.mark.parametrize(("ranks", "last"), [(2, 0), (4, 1)])
def test_gpus_that_share_the_layers_hold_every_number_once(architecture, masters_of, ranks, last):
    """Each of them heads of its own, and columns or rows of what follows; a vocabulary ends where it ends."""
    arch = architecture(
        hidden_size=512, intermediate_size=512, num_heads=8, num_kv_heads=4, head_dim=128, vocab_size=152, num_layers=1
    )
    names = rollout_formats(PrecisionContract(), arch.num_layers).stored_names()
    sent = stored_weights(masters_of(arch), names, POW2.weights)
    layouts = specs_of(sent)
    whole = find_slots(layouts, {})
    found = {name: [] for name in sent}
    for rank in range(ranks):
        cuts = find_cuts(layouts, rank, ranks, last)
        own = cut_specs(layouts, cuts)
        slots, held = find_slots(own, {}), {}
        for name, slot in slots.items():
            rows = 192 // ranks if name in ("model.embed_tokens.weight", "lm_head.weight") else slot.end
            rows = max([rows, *(each.end for each in slots.values() if each.parameter == slot.parameter)])
            held[slot.parameter] = torch.zeros(rows, *[slot.width] * (slot.width > 0), dtype=sent[name].dtype)
        check_fit(layouts, whole, whole_parameters(specs_of(held), ranks, last))
        for name, tensor in sent.items():
            part = tensor if (cut := cuts.get(name)) is None else cut.of(tensor)
            slots[name].of(held[slots[name].parameter]).copy_(part)
        for name, slot in slots.items():
            found[name].append((cuts.get(name), slot.of(held[slot.parameter])))
    attention, heads = f"{LAYER}.self_attn", 8 // ranks
    assert found[f"{attention}.q_proj.weight"][1][1].shape == (heads * 128, 512)
    assert found[f"{attention}.o_proj.weight"][1][1].shape == ((512, heads * 128) if last else (512 // ranks, 1024))
    for name, parts in found.items():
        cut = parts[0][0]
        read = parts[0][1] if cut is None else torch.cat([part.float() for _, part in parts], cut.axis)
        assert torch.equal(read.float(), sent[name].float()), name
    (cut, _), *_ = found[f"{LAYER}.input_layernorm.weight"]
    assert cut is None


EXPERTS = f"{LAYER}.mlp.experts"
HELD = f"{EXPERTS}.routed_experts"


@pytest.fixture
def experts():
    """Four experts of a layer in block FP8, in the order a trainer ships them: 512 rows of gate and of up."""
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for e in range(4):
        for part, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512))):
            codes = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            tensors[f"{EXPERTS}.{e}.{part}_proj.weight"] = codes
            tensors[f"{EXPERTS}.{e}.{part}_proj.weight_scale_inv"] = codes[::128, ::128].float().clone()
    return tensors


@pytest.fixture
def held():
    """The same as vLLM holds it."""
    return {
        f"{HELD}.w13_weight": torch.zeros(4, 1024, 256, dtype=torch.uint8),
        f"{HELD}.w2_weight": torch.zeros(4, 256, 512, dtype=torch.uint8),
        f"{HELD}.w13_weight_scale_inv": torch.zeros(4, 8, 2),
        f"{HELD}.w2_weight_scale_inv": torch.zeros(4, 2, 4),
    }


def test_experts_lie_one_after_another_gate_above_up(experts, held):
    slots = find_slots(specs_of(experts), {})
    check_fit(specs_of(experts), slots, specs_of(held))
    for name, slot in slots.items():
        slot.of(held[slot.parameter]).copy_(experts[name])
    for e in range(4):
        parts = [experts[f"{EXPERTS}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        assert held[f"{HELD}.w13_weight"][e].equal(torch.cat(parts[:2]))
        assert held[f"{HELD}.w2_weight"][e].equal(parts[2])
        tiles = [experts[f"{EXPERTS}.{e}.{part}_proj.weight_scale_inv"] for part in ("gate", "up", "down")]
        assert held[f"{HELD}.w13_weight_scale_inv"][e].equal(torch.cat(tiles[:2]))
        assert held[f"{HELD}.w2_weight_scale_inv"][e].equal(tiles[2])


def test_gpus_that_share_experts_hold_rows_of_each(experts, held):
    """And read them back, without one another's, to the fingerprints of what was sent."""
    halves = {name: whole[:, : whole.shape[1] // 2].clone() for name, whole in held.items()}
    with share_weights(experts) as sent:
        received = open_weights(sent, torch.device("cpu"))
    sums = []
    for rank, share in enumerate(find_shares(specs_of(experts), {}, specs_of(halves), 2, 0)):
        places = WeightPlaces(halves, share)
        places.write(halves, received)
        for kind, of_part, of_hidden in (("weight", 256, 128), ("weight_scale_inv", 2, 1)):
            for e in range(4):
                parts = [experts[f"{EXPERTS}.{e}.{part}_proj.{kind}"] for part in ("gate", "up", "down")]
                gate, up, _ = (each[rank * of_part :][:of_part] for each in parts)
                assert halves[f"{HELD}.w13_{kind}"][e].equal(torch.cat([gate, up]))
                assert halves[f"{HELD}.w2_{kind}"][e].equal(parts[2][rank * of_hidden :][:of_hidden])
        sums.append(places.sums(halves, lambda part, axis: pytest.fail("gathered")))
    assert combine_sums(sums) == fingerprints(list(experts.values()))


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("1.up_proj.weight", r"w13_weight: rows from 1536 to 2048 are missing"),
        ("0.gate_proj.weight_scale_inv", r"w13_weight_scale_inv: rows from 0 to 4 are missing"),
    ],
)
def test_a_missing_part_of_an_expert_is_named(experts, held, missing, complaint):
    del experts[f"{EXPERTS}.{missing}"]
    _refused(specs_of(experts), specs_of(held), complaint)


def test_a_file_brings_every_bit_and_goes():
    tensors = {
        "codes": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 8),
        "scales": torch.tensor([[0.5, -0.0], [float("inf"), 3.0]]),
        "norm": torch.randn(5).bfloat16().requires_grad_(),
        "turned": torch.randn(3, 4).t(),
    }
    with share_weights(tensors) as sent:
        received = open_weights(sent, torch.device("cpu"))
    assert not Path(sent["file"]).exists()
    assert received.names == list(tensors)
    for (storage, first, size), tensor in zip(received.places, tensors.values(), strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        assert received.storages[storage][first : first + size].equal(flat)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(math.nan, "was never written"), *((bad, "was read back as") for bad in (0.0, -1.0, math.inf))],
)
def test_a_scale_that_was_never_written_or_is_none_is_refused(value, reason):
    first, second = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    assert written_scales([first, second]) == (LayerScales(*first), LayerScales(*second))
    for place, name in enumerate("qkv"):
        values = [*second]
        values[place] = value
        with pytest.raises(EngineUpdateError, match=f"layer 1: its scale of {name} {reason}"):
            written_scales([first, values])
