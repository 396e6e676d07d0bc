"""What training takes: golden numbers by hand, the torch trainer's own tensors, and what more GPUs do."""

import itertools
from dataclasses import fields, is_dataclass, replace

import pytest
from torch import Tensor

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.initial import initial_weights
from fp8core.models.weights import load_policy
from fp8core.plan.shapes import model_shape
from fp8core.plan.training import Parallel, emulated_bytes, gpu_state, gpu_step, host_needs
from fp8core.workers.build import build_trainer

DENSE, EXPERTS = 1_541_093_376, 28_991_029_248  # Of Qwen3-30B-A3B; 48 layers of 128 experts of 3 x 2048 x 768.


def by_item(needs):
    return {need.item: need.bytes for need in needs}


def tensors_in(value):
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def test_qwen3_8b_on_one_gpu(configured):
    config = configured("qwen3-8b", training__micro_batch=4)
    arch, total, linears = model_shape(config), 8_190_735_360, 6_945_767_424
    assert by_item(gpu_state(arch, Parallel())) == {"master weights": 4 * total, "optimiser states": 8 * total}
    step = by_item(gpu_step(config, arch, Parallel()))
    assert step["gradients"] == 4 * total
    assert step["weights"] == linears + 4 * (linears // 128**2) + 2 * (total - linears)
    assert step["quantised copies"] == linears
    tokens = 4 * (512 + 128)
    layer = 5 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12_288
    codes = 2 * (2 * 4096 + 4096 + 12_288)
    assert step["activations"] == tokens * (36 * 2 * 4096 + 4 * layer + codes)


def test_bf16_training_has_bf16_weights_and_no_copies(configured):
    config = configured("qwen3-8b", "bf16")
    step = by_item(gpu_step(config, model_shape(config), Parallel()))
    assert step["weights"] == 2 * 8_190_735_360
    assert "quantised copies" not in step


def test_experts_are_shared_out_and_optimiser_states_over_all_gpus(configured):
    config = configured("qwen3-30b-a3b")
    arch, parallel = model_shape(config), Parallel(gpus=8, expert=8)
    step = by_item(gpu_step(config, arch, parallel))
    assert step["gradients"] == 4 * (DENSE + EXPERTS // 8)
    assert by_item(gpu_state(arch, parallel))["optimiser states"] == DENSE + EXPERTS


def test_tensor_parallelism_leaves_norms_and_routers_whole(configured):
    config = configured("qwen3-30b-a3b")
    step = by_item(gpu_step(config, model_shape(config), Parallel(gpus=4, tensor=4, expert=4)))
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    assert step["gradients"] == 4 * (whole + (DENSE - whole) // 4 + EXPERTS // 4)


def test_the_first_and_last_pipeline_stage_hold_embedding_and_head(configured):
    config = configured("qwen3-8b")
    step = by_item(gpu_step(config, model_shape(config), Parallel(gpus=2, pipeline=2)))
    layers = 18 * (192_937_984 + 2 * 4096 + 2 * 128)
    assert step["gradients"] == 4 * (layers + 622_329_856 + 4096)


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b"])
def test_more_gpus_never_need_more_of_each(configured, model):
    config = configured(model)
    arch = replace(model_shape(config), num_layers=4)

    def needed(parallel):
        return sum(need.bytes for need in (*gpu_state(arch, parallel), *gpu_step(config, arch, parallel)))

    experts = (1, 2, 4) if arch.experts else (1,)
    for tensor, pipeline, expert in itertools.product((1, 2, 4), (1, 2, 4), experts):
        sizes = [needed(Parallel(gpus, tensor, pipeline, expert)) for gpus in (16, 32, 64)]
        assert sizes == sorted(sizes, reverse=True)
    for wider in ("tensor", "pipeline", *(["expert"] if arch.experts else [])):
        sizes = [needed(Parallel(gpus=16, **{wider: ways})) for ways in (1, 2, 4)]
        assert sizes == sorted(sizes, reverse=True), wider


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(gpus=4, tensor=3), "4 GPUs are no multiple of tensor 3 x pipeline 1"),
        (Parallel(gpus=4, tensor=2, pipeline=4), "4 GPUs are no multiple of tensor 2 x pipeline 4"),
        (Parallel(gpus=16, tensor=16), "tensor 16 does not divide the model's 8 KV heads"),
        (Parallel(gpus=64, pipeline=64), "pipeline 64 exceeds the model's 36 layers"),
        (Parallel(gpus=8, pipeline=8), "pipeline 8 does not divide the model's 36 layers"),
        (Parallel(gpus=2, expert=2), "expert 2 does not divide the model's 1 experts"),
    ],
)
def test_a_grid_that_does_not_come_out_even_is_refused(configured, parallel, message):
    with pytest.raises(UserError) as caught:
        parallel.check(model_shape(configured("qwen3-8b")))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("settings", [[], ["architecture.tie_embeddings=true"]])
def test_the_host_holds_what_the_torch_trainer_allocates(name, settings):
    config = load_config(name, settings)
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    masters = sum(tensor.nbytes for tensor in trainer.masters.values())
    needs = by_item(host_needs(config, arch))
    assert needs["master weights"] == needs["gradients"] == needs["optimiser states"] // 2 == masters
    own = {tensor.data_ptr() for tensor in trainer.masters.values()}
    ready = load_policy(arch, trainer.export(), trainer.masters)
    held = sum(tensor.nbytes for tensor in tensors_in(ready) if tensor.data_ptr() not in own)
    assert held / 1.05 < needs["weights"] <= held
    inference = sum(tensor.nbytes for tensor in tensors_in(load_policy(arch, trainer.export())))
    assert inference / 1.05 < emulated_bytes(arch) <= inference
