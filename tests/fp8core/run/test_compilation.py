"""Which kernels a configuration has compiled before it begins, and the passes that compile them, here on a CPU."""

from dataclasses import replace

import pytest

import fp8core.run.compilation as module
from fp8core.config.load import load_config
from fp8core.config.training import LoraConfig
from fp8core.errors import UserError
from fp8core.kernels.compilation import KernelFolders, multiply
from fp8core.models.architecture import Experts
from fp8core.models.hub import model_shape
from fp8core.numerics import dispatch
from fp8core.run.compilation import compile_kernels, decode, learn, planned_jobs, score, sweep_gradients, warm_up
from fp8core.training.registry import trainer_of

PACKS = range(128, 385, 128)


@pytest.fixture
def folders(tmp_path):
    return KernelFolders(tmp_path / "deep_gemm", tmp_path / "triton")


@pytest.fixture
def small(architecture):
    """A small model of whole tiles, and a configuration that packs it on this CPU."""
    arch = architecture(hidden_size=256, intermediate_size=384, num_heads=4, num_kv_heads=2, head_dim=128)

    def configured(linear, cache):
        side = {"linear": linear, "kv_cache": cache}
        precision = {"rollout": side, "training": side, "rounding_points": "kernels"}
        packed = {"training.packed": True, "warm_start.steps": 1, "rollout.vllm.max_model_len": 128}
        return load_config("tiny", {"precision": precision, **packed})

    return arch, configured


@pytest.fixture
def called(monkeypatch):
    """Names of the operations that were called where a kernel would stand in, by their last dimension."""
    found = set()

    def stand_in(_, name):
        found.add(name)
        return dispatch.OPERATIONS[name][0]

    monkeypatch.setattr(dispatch, "has_kernels", lambda _: True)
    monkeypatch.setattr(dispatch, "kernel_of", stand_in)
    return found


def qwen3(*overrides):
    config = load_config("qwen3-aligned", ["model=Qwen/Qwen3-8B-Base", *overrides])
    return config, model_shape(config)


def test_trainer_and_warm_start_call_every_operation_that_has_a_kernel(small, called):
    arch, configured = small
    fp8, bf16 = configured("fp8_block", "fp8"), configured("bf16", "bf16")
    mixed = fp8.precision.model_copy(update={"bf16_first_layers": 1})
    experts = Experts(count=4, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
    sparse = replace(arch, family="qwen3_moe", experts=experts)
    for work in (score, learn):
        for shape in (arch, sparse):
            work(fp8, shape, PACKS[:2])
            work(bf16, shape, PACKS[:2])
    score(fp8.model_copy(update={"precision": mixed}), arch, PACKS[:1])
    assert "merged_weight" not in called, "nothing is merged where all weights learn"
    lora = fp8.training.model_copy(update={"lora": LoraConfig(rank=2)})
    score(fp8.model_copy(update={"training": lora}), arch, PACKS[:1])
    both = set(called)
    called.clear()
    warm_up(fp8, arch, PACKS[:2])
    assert {"packed_attention_backward", "swiglu", "adamw"} <= called, "the warm start trains in BF16"
    # The kernel of attention calls the first three, and SGLang the last one.
    inside = {"head_codes", "head_values", "head_gradients", "drawn_tokens"}
    assert both == dispatch.OPERATIONS.keys() - inside


def test_a_training_in_fp8_compiles_all_kernels_of_both_sides(folders, monkeypatch):
    monkeypatch.setattr(module, "has_deep_gemm", lambda: True)
    config, arch = qwen3()
    jobs = planned_jobs(config, arch, folders)
    works = [job.work for job in jobs]
    assert len({job.mark("") for job in jobs}) == len(jobs)
    assert {work for work in works if works.count(work) == 1} == {sweep_gradients, score, learn}
    assert works.count(decode) == len(works) - works.count(multiply) - 3
    for product in trainer_of(config.training).products(config, arch):
        parts = [job.arguments[0] for job in jobs[: works.index(score)] if job.work == multiply]
        rows = {n for each in parts if replace(each, rows=()) == replace(product, rows=()) for n in each.rows}
        assert {(n - 1) // 16 for n in product.rows} <= {(n - 1) // 16 for n in rows}
    assert {job.folder for job in jobs if job.work == multiply} == {folders.deep_gemm}


@pytest.mark.parametrize(("platform", "reason"), [("cpu", "torch sees no GPU"), ("sm_100", "this GPU is sm_100")])
def test_what_compiles_for_hopper_is_refused_elsewhere(folders, platform, reason):
    with pytest.raises(UserError, match=f"^qwen3-aligned compiles for .*{reason}$"):
        compile_kernels(qwen3()[0], platform, folders, lambda *_: None)
