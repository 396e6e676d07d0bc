"""Rows that say of which engine and runs they are, and that are on disk when a process ends."""

import json

import pytest

from benchmarks.rollout_rows import StoredRows, engine_row, repeated
from fp8core.config.vllm import VllmConfig


@pytest.mark.parametrize(
    ("implementation", "kernel"), [("FlashAttentionImpl", "flash_attention"), ("DecodeImpl", "fp8_decode")]
)
def test_an_engine_is_what_it_says_and_what_it_was_told(implementation, kernel):
    said = {"model": "stock", "backend": {"implementation": implementation}, "kernels": {}, "runner": "v1", "graphs": 1}
    assert engine_row(said, VllmConfig(batched_tokens=4096, batch_invariant=True, block_size=64)) == {
        "batch_invariant": True,
        "batched_tokens": 4096,
        "block_size": 64,
        "forward": "stock",
        "decode_kernel": kernel,
        "backend": {"implementation": implementation},
        "kernels": {},
        "runner": "v1",
    }


def test_the_row_is_of_the_middle_run_and_has_all_of_them():
    speeds = {1: 100.0, 2: 300.0, 3: 200.0}

    def run(seed):
        return {
            "seed": seed,
            "tokens_per_s": speeds[seed],
            "seconds": 0.1 * seed,
            "step_ms": [],
            "collections": {},
            "processors": [seed],
        }

    rows = list(repeated(run, 3))
    assert [row["seed"] for row in rows] == [1, 1, 3], "the slower one of two"
    assert rows[-1]["all_tokens_per_s"] == [100.0, 300.0, 200.0]
    assert rows[-1]["runs"][1] == {
        "tokens_per_s": 300.0,
        "seconds": 0.2,
        "step_ms": [],
        "collections": {},
        "processors": [2],
    }
    assert [len(row["runs"]) for row in rows] == [row["repeats"] for row in rows] == [1, 2, 3]


def test_rows_are_stored_as_they_come(tmp_path):
    path = tmp_path / "rows.json"
    rows = StoredRows(path, {"measurement": "some"})

    def stored():
        return json.loads(path.read_text())

    assert stored() == {"measurement": "some", "rows": []}
    rows.append({"kind": "start"})
    assert stored()["rows"] == [{"kind": "start"}]

    def states():
        yield {"runs": 1}
        assert stored()["rows"] == [{"kind": "start"}, {"runs": 1}]
        yield {"runs": 2}
        assert stored()["rows"] == [{"kind": "start"}, {"runs": 2}]
        raise MemoryError("the third")

    with pytest.raises(MemoryError) as raised:
        rows.append_growing(states())
    rows.fail(raised.value)
    assert stored()["rows"] == [{"kind": "start"}, {"runs": 2}]
    assert stored()["error"] == "MemoryError: the third"
    assert "in states" in stored()["traceback"]
