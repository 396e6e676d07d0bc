import pytest

from benchmarks import durability_costs as costs
from fp8core.config.load import load_config


@pytest.mark.slow
def test_small_sizes_go_through_every_measurement(tmp_path):
    settings = {**costs.MINIMAL, "runs": tmp_path, "rollout.prompts_per_step": 3}
    written = costs.writing(load_config("tiny", {**settings, "run": "writing", "steps": 2}))
    parts = written["file_seconds"]
    assert min(parts.values()) > 0
    assert written["share_of_iterations"] == pytest.approx(sum(parts.values()) / written["seconds"]["iterations"])
    assert not (tmp_path / "writing" / "shards" / "again").exists()
    stored = costs.parquet(tmp_path, rows=16, length=64, times=2)
    assert stored["tokens"] == 1024
    assert stored["bytes_per_token_by_column"]["tokens"]["raw"] == pytest.approx(4, abs=0.2)
    assert 0 < stored["bytes_per_token"]["stored"] < stored["bytes_per_token"]["raw"]
    first, last = costs.resume(settings, 1, 3)
    assert last["ledger_lines"] > first["ledger_lines"]
    rows = [stored | {"bound_seconds": 0.5}, written | {"bound_share": 0.05}, first, last]
    assert costs.costs_table(rows).count("\n") == 9
