"""Pages have the tables of stored rows as they are; of made-up rows, what is compared with what."""

import pytest

from benchmarks import host_costs, tables
from benchmarks.harness import ROOT, stored
from benchmarks.studies.greedy_agreement import agreement_table
from benchmarks.tables import TABLES, expert_sync_table, rollout_table, run_table, trace_tables

ENGINE = {"model": "qwen3-8b", "batch_invariant": False, "forward": "stock"}
BF16 = {**ENGINE, "precision": "bf16", "decode_kernel": "flash_attention"}
FP8 = {**ENGINE, "precision": "fp8_linear_kv", "decode_kernel": "fp8_decode"}
SHAPE = {"kind": "rollout", "requests": 512, "prompt": 512, "generated": 2048, "long_tailed": False}
RUN = {
    "tokens_per_s": 13676.6,
    "seconds": 76.7,
    "step_ms": [{"median": 18.04 + i, "p99": 30.0, "max": 40.0 * (i + 1)} for i in range(2)],
    "processors": [
        {"process": "EngineCore", "all": 1.02, "threads": [0.55, 0.45, 0.02]},
        {"process": "driver", "all": 0.0, "threads": []},
    ],
}


def rollout(engine, speed, batched_tokens=2048, **more):
    return {**SHAPE, **engine, "batched_tokens": batched_tokens, "tokens_per_s": speed, **more}


def cells(table, *columns):
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [tuple(line[column] for column in columns) for line in lines]


def test_a_row_is_compared_with_bf16_of_its_shape_and_its_tokens_a_step():
    rows = [
        rollout(BF16, 1000.0),
        rollout(BF16, 2000.0, 8192),
        rollout(FP8, 1500.0, all_tokens_per_s=[1500.0, 1490.0]),
        rollout(FP8, 1500.0, 8192),
        rollout(FP8, 1500.0, 4096),
        rollout(FP8, 1500.0, requests=256),
        rollout(FP8, 1500.0, long_tailed=True),
    ]
    assert cells(rollout_table(rows), 3, 4, 5, 6) == [
        ("2,048", "1,000", "1.00x", "1,000"),
        ("8,192", "2,000", "1.00x", "2,000"),
        ("2,048", "1,500", "1.50x", "1,500, 1,490"),
        ("8,192", "1,500", "0.75x", "1,500"),
        ("4,096", "1,500", "not measured", "1,500"),
        ("2,048", "1,500", "not measured", "1,500"),
        ("2,048", "1,500", "not measured", "1,500"),
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"batch_invariant": True, "forward": "aligned"}, ", batch-invariant, aligned"),
        ({"experts": "deep_gemm", "routes": False, "variables": {}}, ""),
        ({"block_size": None}, ""),
        ({"block_size": 128}, ", pages of 128"),
        ({"experts": "triton"}, ", experts by Triton"),
        ({"routes": True}, ", ready for routes"),
        ({"routes": True, "routes_reported": True}, ", routes reported"),
        ({"variables": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}, ", VLLM_USE_V2_MODEL_RUNNER=1"),
    ],
)
def test_an_engine_is_told_from_the_one_beside_it(changed, words):
    assert cells(rollout_table([rollout(FP8, 1.0, **changed)]), 1) == [("FP8 linears, cache and attention" + words,)]


def test_other_kinds_of_rows_are_in_no_table_of_rollouts():
    others = [{"kind": kind} for kind in ("start", "described", "routes", "update")]
    assert rollout_table([*others, trace(), rollout(FP8, 1.0)]) == rollout_table([rollout(FP8, 1.0)])
    assert run_table([*others, trace()]) == ""
    assert len(trace_tables([*others, rollout(FP8, 1.0), trace()])) == 1


def test_every_run_says_when_its_steps_came_and_who_was_busy():
    heard = {"collections": {"count": 9, "frozen": 0, "all": 1500.4, "max": 410.2}}
    runs = [RUN, {**RUN, **heard, "tokens_per_s": 17413.0}]
    row = rollout(FP8, 13676.6, 8192, runs=runs, commit="0123456789")
    lines = run_table([rollout(FP8, 1.0), row]).splitlines()[2:]
    about = "| Qwen3-8B, 512 x (512 + 2048), FP8 linears, cache and attention, ours, commit 0123456, run"
    steps, busy = "18.0, 19.0 | 40.0, 80.0", "EngineCore 1.02 (0.55), driver 0.00 (0.00) |"
    assert lines == [
        f"{about} 1 | 13,677 | {steps} |  | {busy}",
        f"{about} 2 | 17,413 | {steps} | 1,500 (410) | {busy}",
    ]


def test_rows_without_their_runs_have_no_table_of_runs():
    assert run_table([rollout(FP8, 1.0)]) == ""


def trace(engine=FP8, requests=256, commit="0123456789"):
    measured = {"parts_ms": {"linear": 1.0, "attention": 2.5}, "idle_ms": 0.5, "step_ms": 4.0}
    return {"kind": "decode_trace", **engine, "requests": requests, "context": 2048, "commit": commit, **measured}


def headings(traces):
    return [table.splitlines()[0].removesuffix(" | ms | share |").removeprefix("| ") for table in trace_tables(traces)]


def test_a_traced_step_by_part():
    assert trace_tables([trace()]) == [
        "| one decode step, 256 requests at 2,048 tokens | ms | share |\n"
        "| --- | --- | --- |\n"
        "| attention | 2.50 | 62.5% |\n"
        "| linear | 1.00 | 25.0% |\n"
        "| nothing runs | 0.50 | 12.5% |\n"
        "| all | 4.00 | 100.0% |"
    ]


def test_headings_of_traces_say_what_differs():
    step = "one decode step, 256 requests at 2,048 tokens"
    assert headings([trace(), trace(requests=512)]) == [step, "one decode step, 512 requests at 2,048 tokens"]
    flash = {name: value for name, value in FP8.items() if name != "forward"} | {"decode_kernel": "flash_attention"}
    assert headings([trace(flash), trace(), trace({**FP8, "forward": "aligned"})]) == [
        f"{step}, stock forward, decoded by FlashAttention 3",
        f"{step}, stock forward, decoded by ours",
        f"{step}, aligned forward, decoded by ours",
    ]
    assert headings([trace(BF16), trace({**FP8, "decode_kernel": "flash_attention"})]) == [
        f"{step}, BF16",
        f"{step}, FP8 linears, cache and attention",
    ]
    assert headings([trace(), trace(commit="abcdefabcdef")]) == [f"{step}, commit 0123456", f"{step}, commit abcdefa"]


SYNC = {"kind": "sync", "model": "qwen3-30b-a3b", "bytes": 31_174_545_408, "tensors": 37_491, "shared_layers": False}
SOURCE = {"commit": "0123456", "command": "moe_sync"}


def sync(seconds, **changed):
    return {**SYNC, **SOURCE, "seconds": seconds, "readback_seconds": seconds / 2, **changed}


def test_the_middle_update_of_a_process_but_its_first():
    rows = [sync(9.0), sync(1.0), sync(2.0), sync(1.2), sync(3.0, commit="abcdef0", shared_layers=True)]
    dense = {**sync(0.4), "model": "qwen3-8b"}
    table = expert_sync_table([dense, {"kind": "start", "model": "qwen3-30b-a3b"}, *rows])
    assert table.splitlines()[2:] == [
        "| 37,491 tensors, all layers' | 31.2 | 1,200 | 600 |",
        "| 37,491 tensors, one layer's for all, the first update of a process | 31.2 | 3,000 | 1,500 |",
    ]


PRINTERS = {
    **TABLES,
    "greedy tokens": lambda: [agreement_table(stored("greedy_agreement"))],
    "the process beside a GPU": lambda: host_costs.tables(stored("host_costs")),
}


@pytest.mark.parametrize("found", PRINTERS.values(), ids=PRINTERS)
def test_the_pages_have_every_table_of_what_is_stored(found) -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")) + "\n"
    printed = [table for table in found() if table]
    assert printed
    assert not [table.splitlines()[0] for table in printed if table + "\n" not in text]


def test_a_table_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        tables.main(["nothing"])
    assert "nothing" in capsys.readouterr().err
