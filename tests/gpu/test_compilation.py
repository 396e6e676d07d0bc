"""DeepGEMM compiles exactly the kernels that are planned, and trainers no others than their passes compiled."""

import os
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.kernels.compilation import Job, KernelFolders, missing_jobs, multiply, run_jobs
from fp8core.kernels.cuda import kept_folder
from fp8core.kernels.hopper_gemm import deep_gemm
from fp8core.models.architecture import Architecture
from fp8core.models.hub import model_shape
from fp8core.resources.kernels import Product, shared_out
from fp8core.run.compilation import learn, planned_jobs, product_job, score

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelFolders:
    """Empty folders, of the processes that compile."""
    if deep_gemm() is None:
        pytest.skip("needs DeepGEMM")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return KernelFolders(tmp_path / "deep_gemm", tmp_path / "triton")


@pytest.mark.parametrize(
    "product",
    [
        Product("fp8_block", 1536, 1024, range(1, 1200)),
        Product("fp8_gradient", 768, 512, range(128, 4096, 128)),
        Product("bf16", 2048, 512, range(1, 300)),
    ],
    ids=["codes", "gradient", "head"],
)
def test_no_number_of_rows_needs_a_kernel_that_was_not_planned(folders: KernelFolders, product: Product) -> None:
    jobs = [product_job(part, folders) for part in shared_out([product])]
    run_jobs(jobs, "", lambda *_: None)
    compiled = set(os.listdir(folders.deep_gemm / "cache"))
    run_jobs([Job("every", "", folders.deep_gemm, multiply, (product,))], "", lambda *_: None)
    assert set(os.listdir(folders.deep_gemm / "cache")) == compiled


def passes(config: RunConfig, arch: Architecture, packs: range) -> None:
    """Score and learn with other packs."""
    score(config, arch, packs)
    learn(config, arch, packs)


def test_packs_of_other_lengths_compile_nothing(folders: KernelFolders) -> None:
    config = load_config("h200-small", {"training.tokens_per_pass": 2048, "rollout.vllm.batched_tokens": 256})
    arch = model_shape(config)
    jobs = planned_jobs(config, arch, folders)
    run_jobs(jobs, "", lambda *_: None)
    assert missing_jobs(jobs, "") == []
    compiled = {path.relative_to(folders.triton) for path in folders.triton.glob("*/*.json")}
    kept = [set(os.listdir(folder)) for folder in (kept_folder(), folders.deep_gemm / "cache")]
    run_jobs([Job("passes", "", folders.triton, passes, (config, arch, range(256, 2048, 384)))], "", lambda *_: None)
    assert {path.relative_to(folders.triton) for path in folders.triton.glob("*/*.json")} - compiled == set()
    assert set(os.listdir(kept_folder())) == kept[0]
    # The head of the passes is smaller than the model's.
    added = set(os.listdir(folders.deep_gemm / "cache")) - kept[1]
    assert {name.split(".")[1] for name in added} <= {"sm90_bf16_gemm"}
