"""Pages have the tables of stored rows as they are; of made-up rows, what is compared with what."""

import pytest

from benchmarks import host_costs, tables
from benchmarks.cold_start import cold_start_table
from benchmarks.harness import ROOT, stored
from benchmarks.tables import TABLES, expert_sync_table, rollout_table

ENGINE = {"model": "qwen3-8b", "batch_invariant": False, "forward": "stock"}
BF16 = {**ENGINE, "precision": "bf16", "decode_kernel": "flash_attention"}
FP8 = {**ENGINE, "precision": "fp8_linear_kv", "decode_kernel": "fp8_decode"}
SHAPE = {"kind": "rollout", "requests": 512, "prompt": 512, "generated": 2048, "long_tailed": False}


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
    "cold start": lambda: [cold_start_table(stored("cold_start"))],
    "the process beside a GPU": lambda: host_costs.tables(stored("host_costs")),
}


@pytest.mark.parametrize("found", PRINTERS.values(), ids=PRINTERS)
def test_the_pages_have_every_table_of_what_is_stored(found) -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md")) + "\n"
    printed = [table for table in found() if table]
    assert printed
    assert not [table for table in printed if len(table.splitlines()) < 3], "no rows"
    assert not [table.splitlines()[0] for table in printed if table + "\n" not in text]


def test_a_table_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        tables.main(["nothing"])
    assert "nothing" in capsys.readouterr().err
