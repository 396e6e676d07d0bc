"""A reward model on a GPU: equal scores each time, and those of a CPU but for rounding."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny_reward_model import save_reward_model

from fp8core.config.reward import RewardConfig
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


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
