"""The whole loop with the Megatron trainer, in FP32 on this CPU: alone, on two ranks, and after a kill."""

import json
import os
import shutil
import signal
import time
from importlib.util import find_spec
from threading import Thread

import pytest

from flows.cli import main
from flows.tracking.store import default_tracking_uri
from fp8core.store.artifacts import ArtifactStore

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron Core is not installed")

FP32 = {"linear": "fp32", "kv_cache": "fp32"}
MEGATRON = {
    "precision.rollout": FP32,
    "precision.training": FP32,
    "training.trainer": "megatron",
    "checkpoint.every": 2,
}


@pytest.fixture(scope="module")
def alone(launch):
    return launch("megatron", steps=3, overrides=MEGATRON)


def test_a_run_trains_with_megatron(alone):
    assert alone.summary["steps"] == 3
    assert alone.summary["tmpe_max"] == pytest.approx(1.0, abs=1e-5)
    text = json.dumps(ArtifactStore(alone.folder).get_json(alone.ledger.steps()[1].manifest))
    assert '"trainer": "megatron"' in text
    assert '"megatron-core"' in text


def test_a_run_that_was_killed_ends_with_the_same_weights(alone, launch, tmp_path):
    """The last step is gone: it is redone from the checkpoint before it and its stored rollouts."""
    shutil.copytree(alone.folder, tmp_path / "megatron")
    ledger = tmp_path / "megatron" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    cut = next(
        i for i, line in enumerate(lines) if (e := json.loads(line)).get("step") == 3 and e.get("task") == "reward"
    )
    ledger.write_text("".join(lines[:cut]))
    store = default_tracking_uri(alone.folder.parent)
    again = launch("megatron", steps=3, overrides={**MEGATRON, "runs": str(tmp_path), "tracking.uri": store})
    assert again.summary["weights_digest"] == alone.summary["weights_digest"]


@pytest.mark.parametrize(
    "command",
    [["replay", "RUN", "--step", "2"], ["export", "RUN", "TARGET", "--step", "1"], ["bisect", "RUN", "--prompts", "2"]],
    ids=lambda command: command[0],
)
def test_commands_on_a_run_have_the_environment_of_its_training(command, alone, tmp_path, monkeypatch, capsys):
    """Transformer Engine and vLLM read theirs when they are imported, whoever builds them."""
    rule = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    monkeypatch.setenv(rule, "left by somebody")
    places = {"RUN": str(alone.folder), "TARGET": str(tmp_path / "exported")}
    assert main([places.get(word, word) for word in command]) == 0
    capsys.readouterr()
    assert os.environ[rule] == "0"


def test_a_policy_that_a_grid_has_shared_is_bisected_in_one_process(alone, capsys):
    grid = ("cluster.ranks=4", "training.megatron.tensor_parallel=2", "training.megatron.sequence_parallel=true")
    settings = [flag for setting in (*grid, "training.megatron.pipeline_parallel=2") for flag in ("--set", setting)]
    assert main(["bisect", str(alone.folder), "--prompts", "2", *settings]) == 0
    assert "total" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_two_ranks_share_the_model_and_a_killed_one_is_replaced(launch, runs):
    grid = {**MEGATRON, "cluster.ranks": 2, "training.megatron.tensor_parallel": 2}
    together = launch("megatron-two", overrides=grid)
    assert together.summary["steps"] == 2
    assert together.summary["tmpe_max"] == pytest.approx(1.0, abs=1e-5)
    killed = list[int]()
    killer = Thread(target=kill_rank_after_a_step, args=(runs / "megatron-killed" / "manifests" / "00001.json", killed))
    killer.start()
    hurt = launch("megatron-killed", overrides=grid)
    killer.join()
    places = ArtifactStore(hurt.folder).get_json(hurt.ledger.steps()[2].manifest)["observed"]["cluster"]
    assert places["rank 1"]["pid"] not in killed
    assert hurt.summary["weights_digest"] == together.summary["weights_digest"]
    assert main(["bisect", str(together.folder), "--prompts", "2"]) == 0


def kill_rank_after_a_step(manifest, killed):
    """Kill rank 1 when the manifest of a step says which process it is."""
    deadline = time.monotonic() + 300
    while not manifest.exists():
        assert time.monotonic() < deadline, "no step was committed"
        time.sleep(0.01)
    killed.append(json.loads(manifest.read_text())["observed"]["cluster"]["rank 1"]["pid"])
    os.kill(killed[0], signal.SIGKILL)
