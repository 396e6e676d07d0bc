import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/calibration_hopper.py, which is run from the root of the repository."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.calibration_hopper")


def test_the_table_has_a_line_for_each_source(benchmark):
    about = {"kind": "calibration", "statistic": "amax", "collect_seconds": 0.045, "scales_seconds": 0.02}
    lagging = {**about, "source": "logprob_pass", "tokens": 393_216, "forward_seconds": 0.0, "share_of_step": 0.0037}
    fresh = {**about, "source": "fresh_pass", "tokens": 12_288, "forward_seconds": 0.25, "share_of_step": 0.015}
    text = benchmark.calibration_table([{"kind": "start"}, lagging, {**fresh, "sequences": 8}])
    assert text.splitlines()[2:] == [
        "| logprob_pass, amax | 393,216 | 0 | 45 | 20 | 0.37% |",
        "| fresh_pass, amax, 8 rollouts | 12,288 | 250 | 45 | 20 | 1.50% |",
    ]
