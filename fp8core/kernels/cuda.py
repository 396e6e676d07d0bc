"""CUDA C++ kernels, compiled by NVRTC, which torch ships, when they are first used, and launched on torch's stream.

The result is kept for later processes (`kept_folder`). A launch can be captured in a CUDA graph.
"""

import ctypes
import hashlib
import os
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8core.errors import UserError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FOLDER = Path(__file__).parent


class CudaError(RuntimeError):
    """A call of NVRTC or of the driver failed; the message has the compiler's log."""


class Kernel:
    """On the device that was current when it was made."""

    def __init__(self, name: str, kernel: str, definitions: tuple[tuple[str, int], ...], shared_bytes: int) -> None:
        """`shared_bytes`: bytes of dynamic shared memory a block. Raises CudaError: the source does not compile, or the
        driver does not load it."""
        torch.cuda.synchronize()  # Makes torch's context, for the driver to find.
        major, minor = torch.cuda.get_device_capability()
        options = [f"-D{key}={value}" for key, value in definitions] + [f"--gpu-architecture=sm_{major}{minor}a"]
        image = kept_image(kept_folder(), name, options)
        self._module = ctypes.c_void_p()
        _driver("cuModuleLoadData", ctypes.byref(self._module), image)
        self._function = ctypes.c_void_p()
        _driver("cuModuleGetFunction", ctypes.byref(self._function), self._module, kernel.encode())
        self._shared_bytes = shared_bytes
        _driver("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, grid: Sequence[int], threads: int, arguments: Sequence[Tensor | int | float]) -> None:
        """On the current stream; a tensor is its address, an int 64 bits, a float 32 bits."""
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", self._function, *grid, threads, 1, 1, self._shared_bytes, stream, pointers, None)


@cache
def cuda_kernel(
    name: str, kernel: str, definitions: tuple[tuple[str, int], ...], shared_bytes: int, device: torch.device
) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(name, kernel, definitions, shared_bytes)


def _c_value(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


def source(name: str) -> str:
    shared_bytes = (_FOLDER / "attention.cuh").read_text()
    own = (_FOLDER / f"{name}.cu").read_text()
    return f'{shared_bytes}#line 1 "{name}.cu"\n{own}'


def kept_folder() -> Path:
    return Path.home() / ".cache" / "fp8-grpo" / "kernels"


def kept_image(folder: Path, name: str, options: Sequence[str]) -> bytes:
    """Machine code, from a file of the folder or else from NVRTC, whose version is part of the name."""
    parts = [source(name).encode(), nvrtc_version().encode(), *(option.encode() for option in options)]
    # A digest of each, so that no two lists run together.
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    path = folder / f"{name}-{digest[:32]}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial = folder.parent / f".{path.name}-{secrets.token_hex(8)}"
            partial.write_bytes(_compile(name, options))
            os.replace(partial, path)
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{folder}: kernels cannot be kept there: {error.strerror}") from error


def nvrtc_version() -> str:
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(name: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    text = source(name).encode()
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        _nvrtc("nvrtcCompileProgram", program, len(options), arguments)
    except CudaError as error:
        raise CudaError(f"{error}\n{_text(program, 'nvrtcGetProgramLogSize', 'nvrtcGetProgramLog').decode()}") from None
    return _text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")


def _text(program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(size_of, program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _nvrtc(get, program, content)
    return content.raw


def _nvrtc(function: str, *arguments: Any) -> None:
    result = getattr(_nvrtc_library(), function)(*arguments)
    if result:
        raise CudaError(f"{function} returned {result}")


def _driver(function: str, *arguments: Any) -> None:
    result = getattr(_driver_library(), function)(*arguments)
    if result:
        raise CudaError(f"{function} returned {result}")


@cache
def _nvrtc_library() -> ctypes.CDLL:
    assert torch.version.cuda is not None, "this torch was built without CUDA"
    return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}")


@cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
