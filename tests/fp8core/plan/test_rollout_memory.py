"""What generation takes: golden numbers by hand, and what was measured with vLLM on an H200."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.models.architecture import architecture_from_hf
from fp8core.models.checkpoint import initial_weights
from fp8core.models.hub import model_shape
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.numerics.recipe import POW2
from fp8core.resources.memory import cache_bytes_per_token, count_parameters, shipped_bytes

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "sync_hopper.json"


def test_qwen3_8b_is_counted_as_by_hand(configured):
    # q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 12288 x 4096; two norms, and those of Q and K.
    linears = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12_288 * 4096)
    head = 151_936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    found = count_parameters(model_shape(configured("qwen3-8b")))
    assert (found.linear, found.head) == (linears, head) == (6_945_767_424, 622_329_856)
    assert found.total == found.active == linears + 2 * head + norms


@pytest.mark.parametrize(("model", "total"), [("qwen3-30b-a3b", 30_532_122_624), ("llama-3.1-8b", 8_030_261_248)])
def test_published_models_have_the_parameters_their_cards_say(configured, model, total):
    assert count_parameters(model_shape(configured(model))).total == total


# Layers, vocabulary, hidden size, width of the MLP, heads, KV heads, head size. All share the embedding with the head.
SMALL = {
    "SmolLM2-135M": (134_515_008, "Llama", (30, 49_152, 576, 1536, 9, 3, 64)),
    "Llama-3.2-1B": (1_235_814_400, "Llama", (16, 128_256, 2048, 8192, 32, 8, 64)),
    "Llama-3.2-3B": (3_212_749_824, "Llama", (28, 128_256, 3072, 8192, 24, 8, 128)),
    "Qwen2.5-0.5B": (494_032_768, "Qwen2", (24, 151_936, 896, 4864, 14, 2, 64)),
    "Qwen2.5-1.5B": (1_543_714_304, "Qwen2", (28, 151_936, 1536, 8960, 12, 2, 128)),
}


@pytest.mark.parametrize("model", SMALL)
def test_a_shared_embedding_is_counted_once_and_biases_too(model):
    total, family, sizes = SMALL[model]
    keys = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    config = dict(zip((*keys, "num_key_value_heads", "head_dim"), sizes, strict=True)) | {
        "architectures": [f"{family}ForCausalLM"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    arch = architecture_from_hf(config, "config.json")
    found = count_parameters(arch)
    assert (found.total, found.head) == (total, arch.vocab_size * arch.hidden_size)
    biases = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim * arch.qkv_bias
    norms = (2 * arch.num_layers + 1) * arch.hidden_size
    assert found.linear == total - found.head - norms - biases * arch.num_layers


def test_a_token_meets_eight_of_128_experts(configured):
    found = count_parameters(model_shape(configured("qwen3-30b-a3b")))
    expert = 3 * 2048 * 768
    assert found.total - found.active == 48 * 120 * expert
    assert 3.3e9 < found.active < 3.4e9


@pytest.mark.parametrize(
    ("model", "bf16"), [("qwen3-8b", 147_456), ("llama-3.1-8b", 131_072), ("qwen3-30b-a3b", 98_304)]
)
def test_bytes_of_a_cached_token(configured, model, bf16):
    arch = model_shape(configured(model))
    assert cache_bytes_per_token(arch, "bf16") == bf16
    assert cache_bytes_per_token(arch, "fp8") == bf16 // 2


SYNCED = [*itertools.product(["qwen3-8b"], ["bf16", "fp8_linear", "fp8_linear_kv"]), ("qwen3-30b-a3b", "fp8_linear_kv")]


@pytest.mark.parametrize(("model", "precision"), SYNCED)
def test_a_sync_sends_what_was_measured(planned, model, precision):
    rows = json.loads(MEASURED.read_text())
    (measured,) = {row["bytes"] for row in rows if (row["model"], row["precision"]) == (model, precision)}
    assert planned(model, precision).sync.total == measured


def test_a_sync_sends_the_bytes_that_the_trainer_exports():
    config = load_config("tiny-moe", ["architecture.hidden_size=144", "precision.bf16_last_layers=1"])
    arch = replace(model_shape(config), qkv_bias=True)
    formats = rollout_formats(config.precision, arch.num_layers)
    exported = stored_weights(initial_weights(arch, seed=0), formats.stored_names(), POW2.weights)
    planned = shipped_bytes(arch, config.precision)
    by_type = {dtype: 0 for dtype in ("torch.float8_e4m3fn", "torch.float32", "torch.bfloat16")}
    for tensor in exported.values():
        by_type[str(tensor.dtype)] += tensor.nbytes
    assert list(by_type.values()) == [planned.codes, planned.scales, planned.kept]


@pytest.mark.parametrize(
    ("precision", "tokens"), [("bf16", 802_000), ("fp8_linear", 849_000), ("fp8_linear_kv", 1_699_000)]
)
def test_an_h200_has_room_for_these_tokens_of_qwen3_8b(planned, precision, tokens):
    """143,771 MiB x 0.92, less the weights and 4 GB."""
    plan = planned("qwen3-8b", precision)
    assert plan.cache.tokens == pytest.approx(tokens, abs=500)
    assert plan.refusals == ()


def test_gpus_that_share_the_layers_hold_their_part_of_weights_and_cache(planned):
    whole = planned("qwen3-8b")
    settings = {"cluster__placement": "separate", "rollout__vllm__tensor_parallel": 4}
    plan = planned("qwen3-8b", **settings)
    generating, one = plan.devices[0], whole.devices[0]
    assert generating.count == 4
    weights, alone = (next(iter(device.phases[0].needs)).bytes for device in (generating, one))
    assert weights == -(-alone // 4)
    assert plan.cache.bytes_per_token * 4 == whole.cache.bytes_per_token
    assert plan.cache.tokens > 4 * whole.cache.tokens


def test_the_cache_is_counted_in_whole_sequences(planned):
    cache = planned(
        "qwen3-8b", rollout__max_new_tokens=3072, rollout__prompts_per_step=64, rollout__max_batch=200
    ).cache
    assert cache.sequence == 512 + 3072
    assert cache.sequences == cache.tokens // 3584 == 474
    assert cache.wanted == 200


def test_a_cache_of_a_given_size_is_that_size(planned):
    cache = planned("qwen3-8b", rollout__vllm__kv_cache_gib=9.0).cache
    assert cache.bytes == 9 << 30
    assert cache.tokens == (9 << 30) // 73_728


def test_generating_takes_what_vllm_may_take_and_no_more(planned):
    (device, _) = planned("qwen3-8b").devices
    (phase,) = device.phases
    assert phase.total == phase.limit == int(143_771 * 2**20 * 0.92)
