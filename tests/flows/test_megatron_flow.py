"""The whole loop with the Megatron trainer, in FP32 on this CPU: alone, on two ranks, and after a kill."""

import json
import shutil
from importlib.util import find_spec

import pytest

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
