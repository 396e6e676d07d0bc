"""The tables of stored results, and of updates of experts."""

from benchmarks.hopper_tables import expert_sync_table, main

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


def test_all_stored_rows_have_a_table(capsys):
    main()
    printed = capsys.readouterr().out
    for heading in ("| shape | precision |", "| one decode step, 256 requests", "| sync of 9.4 GB |", "| the probe |"):
        assert heading in printed
    assert "\n\n\n" not in printed
