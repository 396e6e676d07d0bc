"""Compile kernels in parallel.

DeepGEMM, Triton and `kernels.cuda` each compile a kernel in the process that first needs it, and keep it in a folder
for later ones. DeepGEMM holds Python's lock meanwhile, so each job here is work on the GPU in a process of its own.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8core.errors import UserError, described_error
from fp8core.processes.end_with_parent import follow_parent
from fp8core.resources.kernels import Product

# A process holds some GB of the GPU while it works.
_MOST_PROCESSES = 16
_MARKS = "fp8-grpo"


class KernelFolders(NamedTuple):
    """Where the kernels of DeepGEMM and of Triton are kept."""

    deep_gemm: Path
    triton: Path


class Job(NamedTuple):
    """One part of the work, in any process.

    `name` and `about` decide which kernels it compiles, besides libraries and GPU. `folder` keeps most of them, and a
    mark that it was done.
    """

    name: str
    about: str
    folder: Path
    work: Callable[..., None]
    arguments: tuple[Any, ...]

    def mark(self, versions: str) -> Path:
        digest = hashlib.sha256("\n".join([versions, self.name, self.about]).encode()).hexdigest()
        return self.folder / _MARKS / digest


def missing_jobs(jobs: Sequence[Job], versions: str) -> list[Job]:
    """Those that were not done with these versions, or whose kernels were deleted since."""
    return [job for job in jobs if not job.mark(versions).exists()]


def run_jobs(jobs: Sequence[Job], versions: str, progress: Callable[[int, int], None]) -> None:
    """Do the jobs on all processors, in order; `progress` hears how many of how many are done.
    Raises UserError: a job failed; those that are done stay done."""
    processes = min(len(jobs), len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin) as pool:
        running: dict[Future[None], Job] = {pool.submit(job.work, *job.arguments): job for job in jobs}
        progress(0, len(running))
        try:
            for count, future in enumerate(as_completed(running), 1):
                _finish(running[future], future, versions)
                progress(count, len(running))
        finally:
            # After a failure or Ctrl-C, what has not begun never does.
            pool.shutdown(wait=True, cancel_futures=True)


def _finish(job: Job, future: "Future[None]", versions: str) -> None:
    try:
        future.result()
    except BrokenProcessPool as error:
        raise UserError(f"compiling the kernels of {job.name}: a process was killed") from error
    except Exception as error:
        raise UserError(f"compiling the kernels of {job.name}: {described_error(error)}") from error
    mark = job.mark(versions)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UserError(f"{mark.parent}: kernels cannot be kept there: {error.strerror}") from error


def multiply(product: Product, device: str = "cuda") -> None:
    """Compute products of zeros, which compiles their kernels where the library does that."""
    from fp8core.numerics.gemm import forward_gemm, weight_gradient_gemm
    from fp8core.numerics.grouped import ExpertRows, grouped_gemm
    from fp8core.numerics.packed import head_logits
    from fp8core.numerics.recipe import TILE

    def zeros(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(rows, columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        # Column-major with a pitch for tensor maps, as our quantisers and vLLM's write them.
        scales = torch.ones(-(-columns // TILE), -(-rows // 4) * 4, device=device)
        return codes, scales.t()[:rows]

    outputs = product.outputs
    contraction = product.contraction
    # The longest first: its memory serves the others, where rising sizes would each take more of the GPU.
    for rows in sorted(product.rows, reverse=True):
        if product.operands == "bf16":
            hidden, weight = (torch.zeros(n, contraction, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
            head_logits(hidden, weight)
            # Else it would stay until the next ones are there.
            del hidden, weight
        elif product.operands == "fp8_gradient":
            weight_gradient_gemm(zeros(outputs, rows), zeros(contraction, rows))
        elif product.operands == "experts":
            codes = zeros(product.experts * outputs, contraction)[0].view(product.experts, outputs, contraction)
            tiles = torch.ones(product.experts, -(-outputs // TILE), -(-contraction // TILE), device=device)
            # The product reads no more of the rows than their owners, and how many groups there are.
            owners = torch.zeros(rows, dtype=torch.int32, device=device)
            by_expert = ExpertRows(owners, owners, owners, owners, owners[:: product.multiple])
            grouped_gemm(zeros(rows, contraction), (codes, tiles), by_expert)
        else:
            tiles = torch.ones(-(-outputs // TILE), -(-contraction // TILE), device=device)
            forward_gemm(zeros(rows, contraction), (zeros(outputs, contraction)[0], tiles))
    release_memory()


def release_memory() -> None:
    """Wait for the GPU, and leave its memory to the other processes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _begin() -> None:
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's.
    torch.set_num_threads(1)
