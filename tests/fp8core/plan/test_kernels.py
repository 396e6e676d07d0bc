"""The products of engine and trainer that DeepGEMM compiles kernels for."""

from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.resources.kernels import Product
from fp8core.rollout.registry import engine_entry
from fp8core.training.registry import trainer_of


def products(name, *overrides):
    config = load_config(name, ["model=Qwen/Qwen3-8B-Base", *overrides])
    arch = model_shape(config)
    entries = engine_entry(config), trainer_of(config.training)
    return [list(entry.products(config, arch)) for entry in entries]


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


def test_gpus_that_share_the_aligned_model_multiply_rows_of_all_of_them():
    engine, _ = products("qwen3-aligned", "rollout.vllm.tensor_parallel=2", "cluster.placement=separate")
    assert [(each.outputs, each.contraction) for each in engine] == [
        *((3072, 4096), (2048, 4096), (12288, 4096), (2048, 12288), (75968, 4096))
    ]


def test_gpus_that_share_experts_have_the_whole_router():
    shared = ("model=Qwen/Qwen3-30B-A3B", "rollout.vllm.tensor_parallel=2", "cluster.placement=separate")
    engine, _ = products("qwen3-moe-aligned", *shared)
    assert {(each.outputs, each.contraction, each.experts) for each in engine} == {
        *((2560, 2048, 1), (1024, 4096, 1), (128, 2048, 1), (768, 2048, 128), (1024, 768, 128), (75968, 2048, 1))
    }
