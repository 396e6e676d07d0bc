"""What generation takes: golden numbers by hand, and what was measured with vLLM on an H200."""

import itertools
import json
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.models.checkpoint import initial_weights
from fp8core.models.hub import model_shape
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.plan.memory import cache_bytes_per_token, count_parameters, shipped_bytes

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
    arch = model_shape(config)
    formats = rollout_formats(config.precision, arch.num_layers)
    exported = stored_weights(initial_weights(arch, seed=0), formats.stored_names(), "pow2")
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
