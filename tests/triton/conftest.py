"""Triton kernels against the torch reference: in Triton's interpreter on a CPU, and on a GPU from Hopper on.

    TRITON_INTERPRET=1 python -m pytest tests/triton -m "not gpu"
    python -m pytest tests/triton/test_compilation.py
    python -m pytest tests/triton -m gpu

The interpreter does not show that a kernel compiles (`test_compilation`), nor what a GPU's FP8 and BF16 conversions do.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8core.numerics.dispatch import OPERATIONS, has_kernels, kernel_of

# One file has calls of all operations of the others.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: a CPU is the interpreter."""
    triton = pytest.importorskip("triton", reason="needs Triton, which torch for CPUs does not bring")
    interpreted = bool(triton.knobs.runtime.interpret)
    if request.param == "interpreter":
        if not interpreted:
            pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
        return torch.device("cpu")
    if interpreted or not torch.cuda.is_available() or not has_kernels(torch.ones(1, device="cuda")):
        pytest.skip("needs an NVIDIA GPU from Hopper on, and Triton that compiles")
    return torch.device("cuda", torch.cuda.current_device())


Run = Callable[..., Any]


@pytest.fixture
def run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Run:
    """(operation, *arguments) to what its kernel computes: on a GPU the operation itself must have chosen it."""
    if device.type == "cuda":
        return lambda operation, *arguments: operation(*arguments)
    # A few tokens then are several for a program, as in a large batch.
    from fp8core.kernels import norm, rotary

    monkeypatch.setattr(norm, "_BACKWARD_PROGRAMS", 8)
    monkeypatch.setattr(rotary, "_BACKWARD_CHUNKS", 2)

    def interpreted(operation: Callable[..., Any], *arguments: Any) -> Any:
        name = operation.__name__
        return kernel_of(OPERATIONS[name][1], name)(*arguments)

    return interpreted


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
