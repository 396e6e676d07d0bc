"""The CUDA sources of attention compile for Hopper, where CUDA's compiler is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fp8core.kernels import cuda
from fp8core.kernels.decode_attention import cache_definitions
from fp8core.numerics.attention import HEAD_DIMS, QUERY_TYPES
from fp8core.numerics.recipe import AttentionProducts

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
ONLY = {"decode_attention": {"RESIDENT": 3, "STAGES": 2}, "sequence_attention": {}}


@pytest.mark.parametrize("products", QUERY_TYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ONLY)
def test_compiles_for_hopper(name: str, dim: int, products: AttentionProducts, tmp_path: Path) -> None:
    shape, strides = torch.Size((1, 16, 8, dim)), (16 * 8 * dim, 8 * dim, dim, 1)
    definitions = cache_definitions(shape, strides, 4, 4096, products) | ONLY[name]
    source = tmp_path / f"{name}.cu"
    source.write_text(cuda.source(name))
    options = [f"-D{key}={value}" for key, value in definitions.items()]
    command = ["nvcc", "-arch=sm_90a", "-cubin", "-Werror", "all-warnings", *options, source, "-o", tmp_path / "cubin"]
    subprocess.run(command, check=True)
