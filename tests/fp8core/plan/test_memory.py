"""Memory by hand-made numbers, by the bytes that were measured, and by the tensors that the trainers hold."""

from dataclasses import replace

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.models.checkpoint import initial_weights
from fp8core.models.families import parameter_shapes
from fp8core.models.hub import model_shape
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.numerics.recipe import POW2
from fp8core.resources.memory import cache_bytes_per_token, count_parameters, shipped_bytes
from fp8core.run.build import build_trainer
from fp8core.training.lora import adapter_shapes
from fp8core.training.megatron import entry as megatron
from fp8core.training.memory import Parallel, host_needs
from fp8core.training.optimisers.optimiser import Optimiser
from fp8core.training.registry import gpu_memory, trainer_of

DENSE, EXPERTS = 1_541_093_376, 28_991_029_248  # Of Qwen3-30B-A3B; 48 layers of 128 experts of 3 x 2048 x 768.
TOTAL, LINEARS = 8_190_735_360, 6_945_767_424  # Of Qwen3-8B.


def by_item(needs):
    return {need.item: need.bytes for need in needs}


def on_megatron(configured, model):
    return configured(model, training__trainer="megatron")


def test_qwen3_8b_is_counted_as_by_hand(configured):
    # q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 12288 x 4096; two norms, and those of Q and K.
    linears = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12_288 * 4096)
    found = count_parameters(model_shape(configured("qwen3-8b")))
    assert (found.linear, found.head) == (linears, 151_936 * 4096) == (LINEARS, 622_329_856)
    assert found.total == found.active == linears + 2 * found.head + 36 * (2 * 4096 + 2 * 128) + 4096 == TOTAL
    arch = replace(model_shape(configured("qwen3-8b")), family="qwen2", tie_embeddings=True)
    # Qwen2 has biases where Qwen3 has norms of a head of Q and of K.
    assert count_parameters(arch).total == TOTAL - found.head + 36 * (32 + 2 * 8 - 2) * 128


@pytest.mark.parametrize(
    ("model", "total", "cached"),
    [
        ("qwen3-8b", TOTAL, 147_456),
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("qwen3-30b-a3b", DENSE + EXPERTS, 98_304),
    ],
)
def test_published_models_have_these_parameters_and_bytes_of_a_cached_token(configured, model, total, cached):
    arch = model_shape(configured(model))
    found = count_parameters(arch)
    assert found.total == total
    assert found.total - found.active == (48 * 120 * 3 * 2048 * 768 if arch.experts else 0)
    assert (cache_bytes_per_token(arch, "bf16"), cache_bytes_per_token(arch, "fp8")) == (cached, cached // 2)


def test_a_sync_sends_the_bytes_that_the_trainer_exports():
    config = load_config("tiny-moe", ["architecture.hidden_size=144", "precision.bf16_last_layers=1"])
    arch = model_shape(config)
    formats = rollout_formats(config.precision, arch.num_layers)
    exported = stored_weights(initial_weights(arch, seed=0), formats.stored_names(), POW2.weights)
    found = shipped_bytes(arch, config.precision)
    by_type = {dtype: 0 for dtype in ("torch.float8_e4m3fn", "torch.float32", "torch.bfloat16")}
    for tensor in exported.values():
        by_type[str(tensor.dtype)] += tensor.nbytes
    assert list(by_type.values()) == [found.codes, found.scales, found.kept]


def test_experts_are_shared_out_and_optimiser_states_over_all_gpus(configured):
    dense = on_megatron(configured, "qwen3-8b")
    state = by_item(megatron.MEMORY.state(dense, model_shape(dense), Parallel()))
    assert (state["master weights"], state["optimiser states"]) == (4 * TOTAL, 8 * TOTAL)
    config = on_megatron(configured, "qwen3-30b-a3b")
    state = by_item(megatron.MEMORY.state(config, model_shape(config), Parallel(gpus=8, expert=8)))
    assert state["gradients"] == 4 * (DENSE + EXPERTS // 8)
    assert state["optimiser states"] == DENSE + EXPERTS


def packed_step(config):
    grid = trainer_of(config.training).grid(config)
    memory, arch = gpu_memory(config.training), model_shape(config)
    return by_item((*memory.state(config, arch, grid), *memory.step(config, arch, grid)))


def test_the_last_of_eight_packed_ranks_has_most_of_qwen3_30b_a3b(configured):
    """Eight ranks share tiles of 128 rows: of the six of an expert's gate two ranks have none."""
    settings = {"training__device": "cuda", "cluster__ranks": 8, "training__optimiser__state": "bf16"}
    found = packed_step(configured("qwen3-30b-a3b", **settings, training__reduce_gradients="per_pass"))
    experts = 128 * (2 * 128 * 2048 + 256 * 768)
    # The router's rows are one tile; of Q there are four, of K and of V one, of the output's 16 two.
    linears = 48 * (experts + 128 * 2048 + (512 + 2 * 128) * 2048 + 256 * 4096)
    vectors = 48 * (2 * 256 + 2 * 128) + 256
    # The vocabulary has 1187 tiles.
    own = linears + vectors + 2 * 149 * 128 * 2048
    assert (found["master weights"], found["optimiser states"]) == (4 * own, 2 * 2 * own)
    whole = 48 * (2 * 2048 + 2 * 128) + 2048 + 2 * 151_936 * 2048
    assert found["gradients"] == 4 * (linears + whole + 4 * 128 * 2 * 768 * 2048)
    codes = 48 * (128 * 3 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512)
    assert (found["quantised copies"], codes + 48 * 128 * 2048 + whole) == (codes, DENSE + EXPERTS)
    assert found["weights"] == codes + 4 * codes // 128**2 + 2 * (48 * 128 * 2048 + whole)


def test_packed_activations_of_experts_have_the_most_rows_that_can_be(configured):
    settings = {"training__device": "cuda", "training__tokens_per_pass": 16_384}
    # A token has eight rows, and each of 128 experts up to 127 rows of zeros: the 1151 groups of 128 that this fills.
    by_row = 2048 + 768 + 2 * (2 * 768 + 2048) + 8
    route = 4 * 128 + 8 * (4 + 2 * 8)
    attention = 2048 + 4096 + 2 * (2 * 2048 + 2 * 5120 + 4096)
    layer = 1151 * 128 * by_row + 16_384 * (attention + 2 * 2048 + route)
    assert packed_step(configured("qwen3-30b-a3b", **settings))["activations"] == 48 * layer
    stays = 16_384 * (2 * (2 * 2048 + 4096) + 4 * 32)
    settings["training__activation_checkpointing"] = True
    assert packed_step(configured("qwen3-30b-a3b", **settings))["activations"] == 48 * stays + layer


def test_the_host_holds_what_the_torch_trainer_allocates():
    config = load_config("tiny-moe")
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    masters = sum(tensor.nbytes for tensor in trainer.masters.values())
    needs = by_item(host_needs(config, arch))
    assert needs["master weights"] == needs["gradients"] == needs["optimiser states"] // 2 == masters


@pytest.mark.parametrize("settings", [{}, {"training.lora": {"rank": 4}}], ids=["weights", "adapters"])
def test_muon_has_one_moment_for_matrices_and_two_for_the_rest(settings):
    config = load_config("tiny", {"training.optimiser.name": "muon", **settings})
    arch = model_shape(config)
    adapters = config.training.lora is not None
    shapes = adapter_shapes(parameter_shapes(arch), config.training.lora) if adapters else parameter_shapes(arch)
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    optimiser = Optimiser(config.training.optimiser, weights)
    optimiser.update(weights, learning_rate=1e-3)
    state = sum(tensor.nbytes for name, tensor in optimiser.state.items() if not name.startswith("step/"))
    (need,) = (need for need in host_needs(config, arch) if need.item == "optimiser states")
    assert (need.bytes, need.note) == (state, "Muon, FP32, of adapters" if adapters else "Muon, FP32")


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("bf16", 16_381_470_720), ("fp8_linear", 9_437_399_040), ("fp8_linear_kv", 9_437_399_040)],
)
def test_a_sync_sends_what_was_measured(planned, precision, measured):
    assert planned("qwen3-8b", precision).sync.total == measured


def test_ranks_that_share_a_pass_have_its_activations_between_them():
    long = {"rollout.max_new_tokens": 120_000, "rollout.vllm.max_model_len": 131_072, "cluster.ranks": 8}
    found = []
    for shared in (1, 8):
        found.append(packed_step(load_config("qwen3-aligned", {**long, "training.context_parallel": shared})))
    alone, each = found
    assert each["activations"] == pytest.approx(alone["activations"] / 8, rel=0.02)
    assert each["activations"] + each["keys of other ranks"] < alone["activations"] / 2
    assert each["weights"] == alone["weights"]
