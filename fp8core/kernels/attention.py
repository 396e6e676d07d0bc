"""Attention on Hopper: the decode kernel over a paged FP8 cache, and packed sequences by it and by FlashAttention.

FlashAttention 3 decodes from an FP8 cache at little more than half of the memory's bandwidth, because FP8 tensor cores
want V transposed. Decoding is bound by memory, so the kernel widens codes to FP16 instead, which is exact, and
multiplies with FP32 accumulation. It computes as the contract requires: Q, K, V and P are E4M3, P is scaled by 256
(`numerics.attention.decode_attention_reference`).

Nothing depends on the batch: keys are split by their position alone, and partitions are added in their order. So a
token attends alike whether it is decoded, part of a prompt, or part of a sequence that is scored (`token_queries`).

The kernel is CUDA C++. NVRTC, which torch ships, compiles it when it is first used; the result is kept for later
processes (`kept_folder`). It is launched on torch's current stream. Only the libraries' documented C interfaces are
called: no build step, no compiler on the machine. A launch can be captured in a CUDA graph.
"""

import ctypes
import hashlib
import os
import secrets
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8core.errors import UserError
from fp8core.numerics.attention import HEAD_DIM, LARGEST_GROUP, Bf16Attention, Queries
from fp8core.numerics.fused import HeadLayout, Heads, head_codes, head_gradients, head_values, heads_of
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.packed import PAGE, Attended, DevicePack

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHORTEST_PARTITION, _MOST_PARTITIONS = 4096, 4
_SOURCE = Path(__file__).with_name("decode_attention.cu")
_WARPS, _TILE = 4, 32
_TILE_BYTES = _TILE * 2 * HEAD_DIM
# Queries that the kernel's workspace for long sequences is made for.
_QUERIES_AT_ONCE = 8192


class DecodeAttention:
    """The kernel with its workspace, for one shape of model on one device.

    The workspace is shared by all calls, which must be on one stream.
    """

    def __init__(
        self,
        device: torch.device,
        shape: torch.Size,
        strides: tuple[int, ...],
        group: int,
        longest: int,
        queries: int,
        partition: int | None = None,
        resident: int = 3,
        stages: int = 2,
        tokens: int = 1,
    ) -> None:
        """Compile, and take the workspace.

        Args:
            device: a GPU of compute capability 8.9 or higher.
            shape: of the keys, and of the values: [blocks, page, kv_heads, 128]; a page is a multiple of 16.
            strides: of both; the last is 1.
            group: query heads per KV head, at most `LARGEST_GROUP`.
            longest: keys of the longest sequence.
            queries: that are computed at once, which the workspace grows with; of more, as many at a time.
            partition: keys that one block of threads goes through, a multiple of 32; None takes what suits `longest`.
                It decides the order of sums.
            resident: blocks of one multiprocessor that registers are shared out for.
            stages: tiles of 32 keys that a warp has in shared memory.
            tokens: queries side by side that share what is read of the keys where they are of one sequence, as those of
                prompts are; `tokens * group` is at most `LARGEST_GROUP`. It decides no bit.
        """
        _, page, kv_heads, head_dim = shape
        assert 1 <= group * tokens <= LARGEST_GROUP, (group, tokens)
        assert page % 16 == 0, page
        assert (head_dim, strides[-1]) == (HEAD_DIM, 1), (shape, strides)
        partition = partition or partition_of(longest)
        self._strides, self.kv_heads, self.partitions = strides, kv_heads, -(-longest // partition)
        names = ("BLOCK_STRIDE", "KEY_STRIDE", "HEAD_STRIDE")
        definitions = {"GROUP": group, "TOKENS": tokens, "PAGE": page, "PARTITION": partition}
        definitions |= {"RESIDENT": resident, "STAGES": stages}
        definitions |= dict(zip(names, self._strides[:3], strict=True))
        queue = _WARPS * stages * _TILE_BYTES
        self._kernel = kernel(_SOURCE, "decode_attention", tuple(definitions.items()), queue, device.index or 0)
        self._at_once, self._tokens = queries, tokens
        size = queries * kv_heads * self.partitions * group * (HEAD_DIM + 2) if self.partitions > 1 else 1
        self._partial = torch.empty(size, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(queries * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        queries: Queries,
        scales: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Write the attention of the queries to their rows of `out`; the other rows stay.

        Args:
            query: E4M3 [tokens, heads, 128].
            keys: E4M3 [blocks, page, kv_heads, 128] of the strides that were given.
            values: likewise.
            queries: which tokens, and what they see.
            scales: of Q, K and V, FP32 scalars on the device: value = code * scale.
            out: BF16 [tokens, heads, 128].
        """
        assert keys.stride() == values.stride() == self._strides
        assert query.stride()[1:] == (HEAD_DIM, 1)
        table, owners, starts, lengths = queries
        for first in range(0, len(owners), self._at_once):
            count = min(self._at_once, len(owners) - first)
            arguments = (
                *(query, query.stride(0), keys, values, count, table, table.stride(0)),
                *(owners[first:], starts[first:], lengths[first:], *scales),
                *(HEAD_DIM**-0.5, out, out.stride(0), self._partial, self._arrived),
            )
            grid = self.kv_heads, -(-count // self._tokens), self.partitions
            self._kernel.launch(grid, 32 * _WARPS, arguments)


def partition_of(longest: int) -> int:
    """Keys of a partition: few partitions, since most of them are empty when most requests are short."""
    return max(_SHORTEST_PARTITION, -(-longest // (_MOST_PARTITIONS * _TILE)) * _TILE)


def bf16_attention(qkv: Tensor, layout: HeadLayout, pack: DevicePack, exact: Bf16Attention) -> Attended:
    """FlashAttention, whose backward needs its output and log-sum-exp."""
    out, logsumexp = _flash_attention(heads_of(qkv, layout), pack)
    out = out.flatten(1)
    return Attended(out, (out, logsumexp))


def bf16_attention_backward(
    grad: Tensor, qkv: Tensor, saved: tuple[Tensor, ...], layout: HeadLayout, pack: DevicePack, exact: Bf16Attention
) -> Tensor:
    return torch.cat(_flash_attention_backward(grad, heads_of(qkv, layout), saved, pack), dim=1).flatten(1)


def fp8_attention(qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales, longest: int) -> Attended:
    """Every token as a query of its own over a pack that is its own paged cache."""
    assert max(pack.sequences.lengths) <= longest, "a sequence is longer than the engine's longest request"
    query, key, value = head_codes(qkv, layout, scales)
    keys, values = (codes.view(-1, PAGE, *codes.shape[1:]) for codes in (key, value))
    each = torch.arange(len(query) + 1, dtype=torch.int32, device=qkv.device)
    out = torch.empty_like(query, dtype=torch.bfloat16)
    attention = _decode_attention(qkv.device, layout.kv_heads, layout.query_heads // layout.kv_heads, longest)
    q_scale, k_scale, v_scale = (_scalar(scale, qkv.device) for scale in (scales.q, scales.k, scales.v))
    queries = Queries(pack.pages, pack.owners, each, pack.seen)
    attention(query, keys, values, queries, (q_scale, k_scale, v_scale), out)
    return Attended(out.flatten(1), ())


def fp8_attention_backward(
    grad: Tensor, qkv: Tensor, layout: HeadLayout, pack: DevicePack, scales: LayerScales
) -> Tensor:
    values = head_values(qkv, layout, scales)
    grads = _flash_attention_backward(grad, values, _flash_attention(values, pack), pack)
    return head_gradients(grads, qkv, layout, scales)


def _flash_attention(heads: Heads, pack: DevicePack) -> tuple[Tensor, Tensor]:
    """BF16 [tokens, query_heads, head_dim], and log-sum-exp FP32 [query_heads, tokens]."""
    # `torch.nn.attention.varlen` calls this operation. Its own functions change from version to version, and their
    # backward is tied to their forward, whose result may be there already.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *heads, *_bounds(pack), 0.0, True, False, window_size_left=-1, window_size_right=0
    )
    return out, logsumexp


def _flash_attention_backward(grad: Tensor, heads: Heads, saved: tuple[Tensor, ...], pack: DevicePack) -> Heads:
    """Gradients of Q, K and V; `saved` is the output, of any shape, and its log-sum-exp."""
    out, logsumexp = saved
    q, k, v = heads
    # Of dropout, which there is none of.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    result = grad.reshape(q.shape), q, k, v, out.view(q.shape), logsumexp
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        *result, *_bounds(pack), 0.0, True, state, unused, window_size_left=-1, window_size_right=0
    )
    return grad_q, grad_k, grad_v


def _bounds(pack: DevicePack) -> tuple[Tensor, Tensor, int, int]:
    """Where sequences start and how long the longest is, for queries and for keys."""
    return pack.starts, pack.starts, pack.sequences.longest, pack.sequences.longest


@cache
def _decode_attention(device: torch.device, kv_heads: int, group: int, longest: int) -> DecodeAttention:
    """One kernel and workspace for all layers, which run one after the other."""
    shape = torch.Size((1, PAGE, kv_heads, HEAD_DIM))
    strides = (PAGE * kv_heads * HEAD_DIM, kv_heads * HEAD_DIM, HEAD_DIM, 1)
    return DecodeAttention(device, shape, strides, group, longest, _QUERIES_AT_ONCE, tokens=LARGEST_GROUP // group)


@lru_cache(maxsize=4096)
def _scalar(value: float, device: torch.device) -> Tensor:
    """FP32 scalar on a device: copying one there waits for it."""
    return torch.tensor(value, device=device)


class CudaError(RuntimeError):
    """A call of NVRTC or of the driver failed; the message names it, and holds the compiler's log if there is one."""


class Kernel:
    """One function of one compiled source, on the device that was current when it was made."""

    def __init__(self, source: Path, name: str, definitions: tuple[tuple[str, int], ...], shared: int) -> None:
        """Compile and load.

        Args:
            source: CUDA C++ with `extern "C"` kernels, without includes.
            name: of the kernel.
            definitions: macros.
            shared: bytes of dynamic shared memory of a block.

        Raises:
            CudaError: the source does not compile for this device, or the driver does not load it.
        """
        torch.cuda.synchronize()  # Makes torch's context, for the driver to find.
        major, minor = torch.cuda.get_device_capability()
        options = [f"-D{key}={value}" for key, value in definitions] + [f"--gpu-architecture=sm_{major}{minor}a"]
        image = kept_image(kept_folder(), source, options)
        self._module = ctypes.c_void_p()
        _driver("cuModuleLoadData", ctypes.byref(self._module), image)
        self._function = ctypes.c_void_p()
        _driver("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        self._shared = shared
        _driver("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared)

    def launch(self, grid: Sequence[int], threads: int, arguments: Sequence[Tensor | int | float]) -> None:
        """Launch on the current stream.

        Args:
            grid: blocks along x, y and z.
            threads: of a block.
            arguments: in the kernel's order; a tensor is its address, an int 64 bits, a float 32 bits.
        """
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", self._function, *grid, threads, 1, 1, self._shared, stream, pointers, None)


@cache
def kernel(source: Path, name: str, definitions: tuple[tuple[str, int], ...], shared: int, device: int) -> Kernel:
    """The kernel for a device, compiled once per process."""
    with torch.cuda.device(device):
        return Kernel(source, name, definitions, shared)


def _c_value(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


def kept_folder() -> Path:
    """The user's compiled kernels of this module, each by what it was compiled from."""
    return Path.home() / ".cache" / "fp8-grpo" / "kernels"


def kept_image(folder: Path, source: Path, options: Sequence[str]) -> bytes:
    """The machine code of a source, from a file of the folder or else from NVRTC, whose version is part of the name.

    A file is renamed when it is whole, so that another process never reads a part of it.
    """
    described = [source.read_bytes(), nvrtc_version().encode(), *(option.encode() for option in options)]
    # A digest of each, so that no two lists run together.
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in described)).hexdigest()
    path = folder / f"{source.stem}-{digest[:32]}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial = folder.parent / f".{path.name}-{secrets.token_hex(8)}"
            partial.write_bytes(_compile(source, options))
            os.replace(partial, path)
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{folder}: kernels cannot be kept there: {error.strerror}") from error


def nvrtc_version() -> str:
    """Of the compiler in this process."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compile(source: Path, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        _nvrtc("nvrtcCompileProgram", program, len(options), encoded)
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
