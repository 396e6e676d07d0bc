"""The kernels that a training needs: DeepGEMM's choice of a tiling, and the products of engine and trainer."""

import pytest

from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.resources.kernels import Product, Tiling, kernels, samples
from fp8core.rollout.registry import engine_entry
from fp8core.training.registry import trainer_of

H200 = 132

# What DeepGEMM 2.5.0's own functions, compiled as they are, choose for each of 1 to 8,192 rows, or of a gradient for
# 128, 256 ... 8,192 tokens: tilings with their first number.
CHOSEN = {
    ("fp8_block", 6144, 4096): """
        16 48 16 1 1: 1, 32 48 16 1 1: 17, 64 48 15 1 1: 33, 64 96 10 1 1: 65, 64 144 7 1 1: 129, 128 96 7 1 1: 193,
        128 144 5 1 1: 257, 128 192 4 1 1: 385, 128 128 5 1 2: 513, 128 144 5 2 1: 641, 128 192 4 2 1: 769,
        256 128 3 1 2: 1025, 256 112 3 1 2: 1537""",
    ("fp8_block", 24576, 4096): """
        16 96 15 2 1: 1, 32 96 13 2 1: 17, 64 96 10 2 1: 33, 128 192 4 1 1: 65, 128 192 4 2 1: 129, 256 128 3 1 2: 385,
        256 112 3 1 2: 641""",
    ("fp8_block", 1024, 2816): """
        16 16 16 1 1: 1, 32 16 16 1 1: 17, 64 16 16 1 1: 33, 64 32 16 1 1: 129, 64 48 15 1 1: 257, 64 64 13 1 1: 385,
        64 80 11 1 1: 513, 64 96 10 1 1: 641, 64 112 9 1 1: 769, 64 128 8 1 1: 833, 128 80 7 1 1: 1025,
        128 96 7 1 1: 1281, 128 112 6 1 1: 1537, 128 128 5 1 1: 1665, 64 128 8 2 1: 2049, 128 160 5 1 1: 2113,
        128 80 7 1 2: 2305, 128 192 4 1 1: 2561, 128 96 7 1 2: 2817, 128 112 6 1 2: 3073, 256 128 3 1 1: 3329,
        128 128 5 1 2: 4097, 128 160 5 2 1: 4225, 128 192 4 2 1: 4737, 256 96 3 1 2: 5633, 256 112 3 1 2: 6145,
        256 128 3 1 2: 6657""",
    ("fp8_gradient", 24576, 4096): "128 152 4 2 1: 128",
    ("fp8_gradient", 1536, 1024): "128 104 5 1 1: 128",
    ("fp8_gradient", 768, 512): "64 24 16 1 2: 128, 64 56 13 1 1: 1920",
    ("bf16", 151936, 4096): "16 192 8 2 1: 1, 32 192 7 2 1: 17, 64 240 4 2 1: 33, 128 192 3 2 1: 65",
}


def products(name, *overrides):
    config = load_config(name, ["model=Qwen/Qwen3-8B-Base", *overrides])
    arch = model_shape(config)
    entries = engine_entry(config), trainer_of(config.training)
    return [list(entry.products(config, arch)) for entry in entries]


@pytest.mark.parametrize(("operands", "outputs", "contraction"), CHOSEN)
def test_tilings_are_those_that_deep_gemm_chooses(operands, outputs, contraction):
    lines = [line.split(":") for line in CHOSEN[operands, outputs, contraction].split(",")]
    expected = {Tiling(*map(int, tiling.split())): int(rows) for tiling, rows in lines}
    rows = range(128, 8193, 128) if operands == "fp8_gradient" else range(1, 8193)
    assert kernels(Product(operands, outputs, contraction, rows), H200) == expected


def test_samples_select_every_kernel_that_any_number_of_rows_does():
    product = Product("fp8_block", 1536, 1024, range(1, 1500))
    chosen = samples([product], H200)
    selected = [set(kernels(Product(*sample[:3], range(sample.rows, sample.rows + 1)), H200)) for sample in chosen]
    assert selected == [{sample.tiling} for sample in chosen]
    for rows in product.rows[::19]:
        (tiling,) = kernels(Product("fp8_block", 1536, 1024, range(rows, rows + 1)), H200)
        assert {tiling} in selected


def test_a_kernel_that_engine_and_trainer_share_is_compiled_once():
    engine, trainer = products("qwen3-aligned")
    both = samples([*engine, *trainer], H200)
    assert len(both) == len(set(both)) < len(samples(engine, H200)) + len(samples(trainer, H200))
    assert max(len(samples([product], H200)) for product in engine) < 20 < len(both) < 100


def test_the_products_of_an_fp8_training():
    engine, trainer = products("qwen3-aligned", "rollout.vllm.batched_tokens=4096", "training.tokens_per_pass=1000")
    layer = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    head = Product("bf16", 151936, 4096, range(1, 4097))
    assert engine == [*(Product("fp8_block", *shape, range(1, 4097)) for shape in layer), head]
    # The longest request is longer than a micro-batch.
    packs = range(128, 1536 + 1, 128)
    transposed = [shape[::-1] for shape in layer]
    gradients = [Product("fp8_gradient", *shape, packs) for shape in layer]
    assert trainer[:-1] == [Product("fp8_block", *shape, packs) for shape in layer + transposed] + gradients
    assert trainer[-1] == Product("bf16", 151936, 4096, range(1, (1 << 27) // 151936 + 1))


def test_gpus_that_share_the_layers_multiply_parts_of_them():
    stock = "rollout.vllm.model=stock", "rollout.vllm.tensor_parallel=4", "cluster.placement=separate"
    engine, _ = products("qwen3-aligned", *stock)
    assert [(each.outputs, each.contraction) for each in engine] == [
        *((1536, 4096), (4096, 1024), (6144, 4096), (4096, 3072)),
    ]


def test_gpus_that_share_the_aligned_model_multiply_rows_of_all_of_them():
    engine, _ = products("qwen3-aligned", "rollout.vllm.tensor_parallel=2", "cluster.placement=separate")
    assert [(each.outputs, each.contraction) for each in engine] == [
        *((3072, 4096), (2048, 4096), (12288, 4096), (2048, 12288), (75968, 4096)),
    ]


def test_a_large_batch_is_decoded_in_one_step():
    engine, _ = products("qwen3-aligned", "rollout.vllm.batched_tokens=256")
    assert {product.rows for product in engine} == {range(1, 513)}


def test_linears_in_bf16_are_multiplied_by_other_libraries():
    formats = [f"precision.{side}={{linear: bf16, kv_cache: bf16}}" for side in ("rollout", "training")]
    engine, trainer = products("qwen3-aligned", "rollout.vllm.model=stock", *formats)
    assert engine == []
    assert [product.operands for product in trainer] == ["bf16"]


def test_what_trains_on_a_cpu_has_none():
    engine, trainer = products("gsm8k")
    assert engine == trainer == []
