"""Where a Triton kernel stands in for the torch reference: the one place that decides it.

Both give the same bytes, so this is a matter of speed only.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None
# Before Hopper, Triton converts FP32 to E4M3 by way of FP16, which rounds twice.
_SINGLE_ROUNDING = (9, 0)


def has_kernels(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor: it is on an NVIDIA GPU from Hopper on, and Triton is installed."""
    return tensor.is_cuda and _HAS_TRITON and torch.cuda.get_device_capability(tensor.device) >= _SINGLE_ROUNDING
