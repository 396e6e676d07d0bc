"""Kernels against the torch reference; everything here needs an NVIDIA GPU from Hopper on and Triton."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp8core.numerics.kernel_choice import has_kernels

# vLLM's processes import the worker of a test by its name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The GPU that kernels run on."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs an NVIDIA GPU from Hopper on")
    # Before the first product: what `training.torch.limits.required_environment` says of a deterministic trainer.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def device(gpu: torch.device) -> torch.device:
    """The GPU, where functions that have kernels launch them."""
    assert has_kernels(torch.ones(1, device=gpu)), "without Triton the reference would be compared with itself"
    return gpu


@pytest.fixture(scope="session")
def kernel_cases() -> ModuleType:
    """benchmarks/kernel_cases.py, which the benchmark checks as well."""
    path = Path(__file__).parents[2] / "benchmarks" / "kernel_cases.py"
    spec = importlib.util.spec_from_file_location("kernel_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
