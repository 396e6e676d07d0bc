"""Attention, trainers and engines on an NVIDIA GPU from Hopper on; tests/triton has the Triton kernels."""

import os
import sys
from pathlib import Path

import pytest
import torch

# vLLM's processes import the worker of a test by its name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The GPU that kernels run on."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs an NVIDIA GPU from Hopper on")
    # Before the first product, as a deterministic trainer requires.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return torch.device("cuda", torch.cuda.current_device())
