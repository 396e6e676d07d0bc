"""A reward model on the trainer's GPU: the scores of a CPU but for rounding, and a training that replays."""

import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_reward_model import save_reward_model

from benchmarks.harness import ROOT, training_command
from fp8core.config.reward import RewardConfig
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
SETTINGS = [
    *("steps=2", "warm_start.steps=3", "warm_start.batch_size=16", "evaluation={every: 100, prompts: 8}"),
    *("rollout.prompts_per_step=16", "rollout.group_size=4", "reward.verifier=reward_model"),
]


@pytest.fixture
def model(tmp_path: Path, bpe_tokenizer: Tokenizer) -> Path:
    return save_reward_model(tmp_path / "model", bpe_tokenizer)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_scores_repeat_and_are_near_those_of_the_cpu(model: Path, dtype: str, tolerance: float) -> None:
    requests = [ScoreRequest(f"{i} apples", "no " * (1 + i % 7), "2", "stop") for i in range(50)]

    def rewards(device: str) -> torch.Tensor:
        options = {"model": str(model), "device": device, "dtype": dtype}
        with closing(build_verifier(RewardConfig(verifier="reward_model", options=options))) as verifier:
            return torch.tensor([verdict.score for verdict in verifier.verify(requests)])

    found = rewards("cuda")
    assert torch.equal(found, rewards("cuda"))
    assert torch.allclose(found, rewards("cpu"), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_training_beside_it_replays_bit_for_bit(tmp_path: Path, model: Path) -> None:
    options = f"reward.options={{model: {model}, device: cuda, sigmoid: true}}"
    command = training_command("h200-small", [*SETTINGS, options, f"runs={tmp_path}", "run=scored"])
    for arguments in (command[1:], ["-m", "flows.cli", "replay", str(tmp_path / "scored"), "--step", "2", "--trust"]):
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "step 2: equal" in done.stdout
