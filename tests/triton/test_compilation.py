"""Every Triton kernel compiles for Hopper, on a machine without a GPU: a driver that launches nothing."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_experts import SMALL, random, rows_of
from test_kernels import CASES

from fp8core import kernels
from fp8core.numerics.adamw import AdamWStep
from fp8core.numerics.dispatch import OPERATIONS, kernel_of
from fp8core.numerics.e4m3 import row_and_column_codes, row_codes
from fp8core.numerics.grouped import GROUP_MULTIPLE, top_k
from fp8core.numerics.kv_scales import TALLY
from fp8core.numerics.recipe import FP32
from fp8core.numerics.truncation import Truncation

triton = pytest.importorskip("triton", reason="needs Triton, which torch for CPUs does not bring")


class Compiler:
    """What Triton asks of a driver, of an H200."""

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *_: (0, 0, 255, 0, 1024),
    )

    def __init__(self) -> None:
        self.launched = set[str]()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: self.launched.add(metadata.name)

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def compiler() -> Compiler:
    """It stays: this file has a process of its own."""
    if triton.knobs.runtime.interpret or torch.cuda.is_available():
        pytest.skip("needs Triton without its interpreter and without a GPU")
    stand_in = Compiler()
    triton.runtime.driver.set_active(stand_in)
    return stand_in


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every operation with a kernel, and arguments."""
    for case in {case.operation: case for case in CASES}.values():
        yield case.operation.__name__, case.arguments()
    logits, targets = torch.zeros(3, 1000), torch.zeros(3, dtype=torch.int64)
    yield "log_softmax", (logits, 0.7)
    yield "token_statistics", (logits, targets, 0.7)
    every = torch.ones(3)
    yield "logit_slopes", (logits, targets, every, 0.7, (every, every), torch.bfloat16)
    yield "drawn_tokens", (logits, every, targets, targets)
    yield "truncated", (logits, 0.7, Truncation(top_k=20, top_p=0.9, min_p=0.01), targets)
    yield "adamw", (*(torch.zeros(4096) for _ in range(4)), AdamWStep(*([0.5] * len(AdamWStep._fields))))
    yield "merged_weight", (torch.zeros(64, 32), torch.zeros(64, 2), torch.zeros(2, 32), 0.5)
    yield "tally", (torch.zeros(TALLY, dtype=torch.int64), random(1, 2, 8, 64), torch.ones(1, 8, dtype=torch.bool), 4.0)

    _, rows = rows_of(*SMALL[1])
    tokens, count, k = SMALL[1]
    router, x, by_row = random(tokens, count).float(), random(tokens, 256), random(len(rows.slots), 256)
    gates, groups = torch.ones(tokens, k), (FP32.activations, FP32.tokens)
    for normalised in (True, False):
        yield "choose_experts", (router, k, normalised)
    yield "expert_rows", (top_k(router, k), count, GROUP_MULTIPLE)
    yield "gathered", (x, rows)
    codes, scales = row_codes(x, FP32.activations)
    yield "gathered_codes", ((codes, scales.t().contiguous().t()), rows)
    yield "swiglu_row_codes", (by_row, groups[0], None, rows)
    for operation, operands in (
        ("row_and_column_codes", (by_row,)),
        ("swiglu_codes", (by_row,)),
        ("swiglu_backward_codes", (by_row[:, :128], by_row)),
    ):
        yield operation, (*operands, *groups, None, rows.spans)
    yield "mixed", (by_row, rows, gates)
    yield "mix_backward", (x, by_row, rows, gates)
    yield "token_sums", (by_row, rows)
    yield "gathered_row_and_column_codes", (x, rows, *groups)
    columns = row_and_column_codes(by_row, *groups, None, rows.spans)[1]
    columns = columns[0], columns[1].t().contiguous().t()
    yield "grouped_weight_gradient", (columns, columns, rows, torch.zeros(count, 256, 256))


def test_every_kernel_compiles(compiler: Compiler) -> None:
    for name, arguments in calls():
        kernel_of(OPERATIONS[name][1], name)(*arguments)
    import_module("fp8core.kernels.head_codes").codes_of_scale_tensor(random(5, 1, 128), torch.ones(()))
    import_module("fp8core.kernels.fingerprint").sums_reader([torch.zeros(64, dtype=torch.uint8)], [0], [64])()
    modules = [import_module(each.name) for each in pkgutil.iter_modules(kernels.__path__, "fp8core.kernels.")]
    written = {name for module in modules for name in vars(module) if name.startswith("_") and name.endswith("_kernel")}
    assert written == compiler.launched
