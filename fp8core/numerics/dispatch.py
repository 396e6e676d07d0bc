"""The one place that decides where a kernel stands in for the torch reference.

A module of `fp8core.kernels` has a function of the reference's name and arguments. Both give the same bytes unless the
reference's module documents a difference."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None
# Before Hopper, Triton converts FP32 to E4M3 by way of FP16, which rounds twice.
_SINGLE_ROUNDING = (9, 0)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and _HAS_TRITON and torch.cuda.get_device_capability(tensor.device) >= _SINGLE_ROUNDING


def with_kernel(module: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """`fp8core.kernels.<module>` computes the reference where kernels take its first argument, a tensor or a
    sequence."""

    def decorate(reference: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(reference)
        def operation(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            first: Any = args[0]
            # One a device: an operation may take tens of thousands.
            tensors = (first,) if isinstance(first, Tensor) else {each.device: each for each in first}.values()
            if not tensors or not all(map(has_kernels, tensors)):
                return reference(*args, **kwargs)
            result: Result = kernel_of(module, reference.__name__)(*args, **kwargs)
            return result

        OPERATIONS[reference.__name__] = (reference, module)
        return operation

    return decorate


@cache
def kernel_of(module: str, name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(import_module(f"fp8core.kernels.{module}"), name)
    return kernel


OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {}
"""Reference and kernel module of every operation whose module has been imported."""
