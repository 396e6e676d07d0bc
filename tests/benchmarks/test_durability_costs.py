import importlib.util
from pathlib import Path

import pytest

from fp8core.config.load import load_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "durability_costs.py"


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("durability_costs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_small_sizes_go_through_every_measurement(costs, tmp_path):
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
    resumed = costs.resume(settings, 1, 3)
    assert resumed["3"]["ledger_lines"] > resumed["1"]["ledger_lines"]
    shown = costs.table({"writing": written, "parquet": stored, "resume": resumed, "bounds": costs.BOUNDS})
    assert shown.count("\n") == 9
