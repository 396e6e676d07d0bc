"""A traced decode step, from launches whose parts are known."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

NAMES = [
    "decode_attention",
    "void deep_gemm::sm90_fp8_gemm",
    "per_token_group_quant_8bit_kernel",
    "_gumbel_sample_kernel",
]
STEP = ((0, 3_000_000), (2, 200_000), (1, 1_000_000), (3, 500_000))  # name and length; 100 us between launches
PAUSE = 100_000


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/decode_trace.py, which is run from the root of the repository."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.decode_trace")


def launches(steps: int) -> list[tuple[int, int, int]]:
    found, now = [], 0
    for name, length in STEP * steps:
        found.append((name, now, length))
        now += length + PAUSE
    return found


def test_parts_and_pauses_add_up_to_the_step(benchmark: ModuleType) -> None:
    row = benchmark.step_parts(NAMES, launches(steps=9))
    assert row["steps"] == 5, "the first two steps and the last two are left out"
    assert row["parts_ms"] == {"attention": 3.0, "linear": 1.0, "quantise": 0.2, "sampler": 0.5}
    assert row["idle_ms"] == 0.4
    assert row["step_ms"] == pytest.approx(sum(row["parts_ms"].values()) + row["idle_ms"])
    assert row["launches"] == 4


def test_every_kernel_has_a_part(benchmark: ModuleType) -> None:
    part_of = benchmark.part_of
    assert part_of("void cutlass::device_kernel<flash::FlashAttnFwdSm90>") == "attention"
    assert part_of("nvjet_sm90_tss_256x128") == "linear"
    assert part_of("triton_red_fused_add_rms_norm_per_token_group_fp8_quant_2") == "quantise"
    assert part_of("triton_red_fused_3") == "compiled (norm, rotary, activation)"
    assert (
        part_of("_add_norm_row_codes_kernel")
        == part_of("_forward_kernel")
        == "fused by hand (norm, rotary, activation)"
    )
    assert part_of("_rows_kernel") == "quantise"
    assert part_of("cunn_SoftMaxForward") == "sampler"
    assert part_of("_gather_block_tables_kernel") == "other"
