import pytest

from fp8core.errors import UserError
from fp8core.models.fp8_selection import KeptInBf16, Selection, in_layer_order, select

Shapes = dict[str, tuple[int, ...]]

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{i}.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]


def decoder(layers: int, linears: list[str], prefix: str = "model") -> Shapes:
    """Names of a decoder, each layer with the given linears, a router where there are experts, and norms."""
    shapes: Shapes = {
        f"{prefix}.embed_tokens.weight": (32, 8),
        "lm_head.weight": (32, 8),
        f"{prefix}.norm.weight": (8,),
    }
    for i in range(layers):
        layer = f"{prefix}.layers.{i}"
        shapes |= {f"{layer}.{linear}.weight": (8, 8) for linear in linears}
        shapes |= {f"{layer}.input_layernorm.weight": (8,), f"{layer}.self_attn.q_proj.bias": (8,)}
        if EXPERTS[0] in linears:
            shapes |= {f"{layer}.mlp.gate.weight": (2, 8), f"{layer}.mlp.shared_expert_gate.weight": (1, 8)}
    return shapes


def weights(layers: range, linears: list[str], prefix: str = "model") -> set[str]:
    return {f"{prefix}.layers.{i}.{linear}.weight" for i in layers for linear in linears}


def choose(shapes: Shapes, layers: int, first: int = 0, last: int = 0, names: tuple[str, ...] = ()) -> Selection:
    return select(shapes, layers, KeptInBf16(first, last, names))


def test_the_linears_of_a_dense_decoder():
    chosen = choose(decoder(12, ATTENTION + MLP), 12)
    assert chosen.quantised == weights(range(12), ATTENTION + MLP)
    assert chosen.kept_modules == ("lm_head",)
    assert chosen.unrecognised == ()


def test_a_head_that_shares_the_embedding_is_a_module_to_keep_all_the_same():
    shapes = decoder(1, ATTENTION)
    del shapes["lm_head.weight"]
    assert choose(shapes, 1).kept_modules == ("lm_head",)


def test_experts_are_quantised_and_their_routers_are_not():
    chosen = choose(decoder(2, ATTENTION + EXPERTS), 2)
    assert chosen.quantised == weights(range(2), ATTENTION + EXPERTS)
    routers = [f"model.layers.{i}.mlp.{name}" for i in range(2) for name in ("gate", "shared_expert_gate")]
    assert chosen.kept_modules == ("lm_head", *routers)
    assert chosen.unrecognised == ()


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model"])
def test_only_the_decoder_of_a_model_that_also_sees(prefix):
    tower = {"vision_tower.encoder.layers.0.self_attn.q_proj.weight": (8, 8)}
    chosen = choose(decoder(2, ATTENTION + MLP, prefix) | tower, 2)
    assert chosen.quantised == weights(range(2), ATTENTION + MLP, prefix)
    assert chosen.unrecognised == tuple(tower)
    assert "vision_tower.encoder.layers.0.self_attn.q_proj" in chosen.kept_modules


def test_matrices_of_unknown_names_stay_and_are_listed():
    unknown: Shapes = {
        "model.layers.0.linear_attn.in_proj.weight": (8, 8),
        "model.layers.0.conv1d.weight": (8, 1, 4),
        "model.layers.0.table": (8, 8),
        "model.layers.1.mlp.experts.gate_up_proj": (2, 8, 16),
    }
    chosen = choose(decoder(2, ATTENTION) | unknown, 2)
    assert set(chosen.unrecognised) == set(unknown)
    # A table directly in a layer is no module; naming its parent would keep the whole layer.
    assert chosen.kept_modules == (
        "lm_head",
        "model.layers.0.conv1d",
        "model.layers.0.linear_attn.in_proj",
        "model.layers.1.mlp.experts",
    )


def test_first_and_last_layers():
    chosen = choose(decoder(12, ATTENTION + EXPERTS), 12, first=1, last=2)
    assert chosen.quantised == weights(range(1, 10), ATTENTION + EXPERTS)
    kept = {f"model.layers.{i}.{module}" for i in (0, 10, 11) for module in [*ATTENTION, "mlp.experts"]}
    assert kept <= set(chosen.kept_modules)
    assert not any(module.startswith("model.layers.9.self_attn") for module in chosen.kept_modules)


def test_layers_beyond_the_decoder_are_not_its_last():
    chosen = choose(decoder(4, ATTENTION), 3, last=1)
    assert chosen.quantised == weights(range(2), ATTENTION) | weights(range(3, 4), ATTENTION)


@pytest.mark.parametrize("pattern", ["*.down_proj", "*.down_proj.weight", "model.layers.*.mlp.down*"])
def test_names_by_pattern_of_module_or_tensor(pattern):
    chosen = choose(decoder(3, ATTENTION + MLP), 3, names=(pattern,))
    assert chosen.quantised == weights(range(3), ATTENTION + MLP[:2])
    assert chosen.kept_modules == ("lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3)))


def test_a_pattern_may_match_what_stays_anyway():
    assert choose(decoder(1, ATTENTION), 1, names=("lm_head",)).quantised == weights(range(1), ATTENTION)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match=r"'\*\.dwon_proj' matches no tensor; names look like model\.embed_tokens"):
        choose(decoder(1, ATTENTION), 1, names=("*.dwon_proj",))


@pytest.mark.parametrize(
    ("pattern", "kept", "quantised"),
    [
        ("*.1.self_attn.k_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"),
        ("*.up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"),
        ("*.experts.1.*", "model.layers.0.mlp.experts.1.down_proj", "model.layers.0.mlp.experts.0.down_proj"),
        ("*.experts.*.down_proj", "model.layers.0.mlp.experts.0.down_proj", "model.layers.0.mlp.experts.0.gate_proj"),
    ],
)
def test_parts_of_what_engines_fuse_are_refused(pattern, kept, quantised):
    shapes = decoder(2, ATTENTION + (EXPERTS if "experts" in pattern else MLP))
    with pytest.raises(UserError) as refused:
        choose(shapes, 2, names=(pattern,))
    assert str(refused.value).startswith(f"{kept}.weight would stay in BF16 and {quantised}.weight would not")


@pytest.mark.parametrize("kept", [KeptInBf16(first_layers=1, last_layers=1), KeptInBf16(names=("*",))])
def test_nothing_left_to_quantise_is_refused(kept):
    with pytest.raises(UserError, match="nothing to quantise: 14 linear weights in 2 decoder layers"):
        select(decoder(2, ATTENTION + MLP), 2, kept)


def test_names_are_sorted_with_their_numbers_as_numbers():
    assert in_layer_order(["b.10", "b.9", "a", "b.9.c"]) == ["a", "b.9", "b.9.c", "b.10"]
