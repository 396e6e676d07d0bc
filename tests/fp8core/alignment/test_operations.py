"""Operations against the decoder they are cut from, and faults against the operation they are planted in."""

import pytest
import torch

from fp8core.alignment.bisect import Side, Task, logprobs
from fp8core.alignment.operations import compare, logprobs_of, operations, remaining, trace
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import load_policy, rollout_formats
from fp8core.numerics.elementwise import FUSED, KERNELS, NATIVE, STEPWISE
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.batch import TokenBatch

QWEN = Architecture(
    family="qwen3",
    vocab_size=50,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_positions=64,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
)
EXPERTS = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=(1,))
FAMILIES = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3_moe": {"experts": EXPERTS},
}
SCALES = (LayerScales(0.03125, 0.03125, 0.03125),) * 2
FP8, BF16 = SidePrecision(), SidePrecision(linear="bf16", kv_cache="bf16")
TOKENS = torch.arange(3, 23)
PROMPT = 5


def _chain(side, points, arch=QWEN):
    formats = rollout_formats(PrecisionContract(rollout=side), 2).with_points(points)
    weights = initial_weights(arch, seed=0)
    biases = {name: torch.linspace(-1, 1, len(bias)) for name, bias in weights.items() if name.endswith(".bias")}
    held = Side.of(formats, weights | biases)
    return held, operations(arch, formats, load_policy(arch, held.stored), TOKENS, SCALES)


@pytest.mark.parametrize("points", [STEPWISE, NATIVE, KERNELS, FUSED], ids=lambda points: points.name)
@pytest.mark.parametrize("side", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_operations_in_order_are_the_decoder(side, points, family):
    arch = Architecture(**{**vars(QWEN), "family": family, **FAMILIES[family]})
    held, chain = _chain(side, points, arch)
    batch = TokenBatch.of([TOKENS[:PROMPT].tolist()], [TOKENS[PROMPT:].tolist()])
    expected = logprobs(arch, held, Task(batch, 1.0, SCALES))[0, PROMPT - 1 :]
    assert torch.equal(logprobs_of(trace(chain)[-1]["logits"], TOKENS[PROMPT:], 1.0), expected)


def test_equal_engines_have_no_error_anywhere():
    _, chain = _chain(FP8, STEPWISE)
    errors = compare(chain, trace(chain))
    assert {error.operation for error in errors} == {operation.name for operation in chain}
    for error in errors:
        assert (error.local_rms, error.accumulated_rms, error.local_differing) == (0, 0, 0)
        assert not error.local_codes
        assert not error.accumulated_codes
    quantised = {(error.operation.rpartition(".")[2], error.value) for error in errors if error.local_codes is not None}
    expected = {("input_layernorm", "normed"), ("post_attention_layernorm", "normed"), ("attn", "attended")}
    assert quantised == expected | {
        ("act_fn", "activated"),
        ("rotary_emb", "k"),
        ("qkv_proj", "v"),
    }


def test_a_fault_is_local_to_its_operation_and_repaired_after_it():
    _, chain = _chain(FP8, STEPWISE)
    place = next(i for i, operation in enumerate(chain) if operation.name == "model.layers.0.mlp.act_fn")
    engine = trace(chain)[: place + 1]
    engine[place] = engine[place] | {"activated": engine[place]["activated"] * 1.25}
    for operation in chain[place + 1 :]:
        engine.append(operation.after(engine[-1]))
    errors = compare(chain, engine)
    assert [error.operation for error in errors if error.local_rms > 0] == [chain[place].name]
    damaged = next(error for error in errors if error.local_rms > 0)
    assert damaged.local_rms == pytest.approx(0.25, rel=0.01)
    assert damaged.local_codes > 0.5
    assert errors[-1].accumulated_rms > 0, "it goes on to the logits"
    scored = remaining(chain, engine, TOKENS[PROMPT:], 1.0)
    wrong = (scored - scored[-1]).abs().mean(dim=1)
    assert (wrong[: place + 1] > 1e-3).all()
    assert not wrong[place + 1 :].any()


def test_rounding_points_show_in_the_operations_they_belong_to():
    _, chain = _chain(BF16, STEPWISE)
    _, kernels = _chain(BF16, KERNELS)
    _, fused = _chain(BF16, FUSED)

    def differing(other):
        found = compare(chain, trace(other))
        return {error.operation.rpartition(".")[2] for error in found if error.local_differing > 0}

    assert differing(kernels) == {"rotary_emb"}, "weights of 1 leave nothing to round before them"
    assert differing(fused) >= {"rotary_emb", "act_fn", "post_attention_layernorm"}
