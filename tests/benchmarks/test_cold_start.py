import json

import pytest

from benchmarks.cold_start import _options, _settings, main
from benchmarks.grpo_8gpu import SHAPES
from fp8core.config.load import load_config
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.resources.memory import GPUS, Machine
from fp8core.training.registry import trainer_grid

SGLANG = [
    *("--set", "rollout.engine=sglang"),
    "--set",
    "rollout.sglang={model: aligned, page_size: 64, kv_cache_gib: 14.5, mem_fraction_static: 0.3, sleep: true}",
]


@pytest.mark.parametrize(
    ("model", "engine"), [*((model, []) for model in SHAPES), ("qwen3-8b", SGLANG)], ids=[*SHAPES, "sglang"]
)
def test_the_measured_training_fits_its_gpu(model, engine, tmp_path):
    name, arch = SHAPES[model]
    settings = _settings(tmp_path, _options(["--out", str(tmp_path), "--model", model, *engine]))
    config, machine = load_config(name, settings), Machine(GPUS["h200"], None)
    refuse_unfit(plan_run(config, arch, machine, trainer_grid(config, machine)))


@pytest.mark.slow
def test_a_rehearsal_has_a_row_a_case_and_one_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    arguments = ["--out", str(tmp_path), "--tiny", "--steps", "1", "--rows", str(tmp_path / "rows.json")]
    assert main([*arguments, "--cases", "kept", "steps"]) == 0
    first, steps = json.loads((tmp_path / "rows.json").read_text())
    assert first["first_token_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert list(first["seconds"]) == [
        *("imports", "compilation", "weights", "digest", "engine", "trainer", "calibration", "sync", "token")
    ]
    assert 0 < first["bytecode"] <= 1
    assert (steps["kind"], steps["compiled_by_step"]) == ("cold_start", [0])
    assert main([*arguments, "--cases", "kept", "--seconds", "0.1"]) == 1
    (failed,) = (row for row in json.loads((tmp_path / "rows.json").read_text()) if row["case"] == "kept")
    assert failed["kind"] == "error"
