"""Small policies of every family, with batches of them; where Megatron is not installed its tests are not collected."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.models.architecture import Architecture
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask

_NEED_MEGATRON = ["test_megatron_trainer.py", "test_megatron_processes.py"]
collect_ignore_glob = [] if find_spec("megatron") else _NEED_MEGATRON
# Processes that tests start import the modules beside this one by their names.
sys.path.insert(0, str(Path(__file__).parent))
from megatron_cases import FAMILIES  # noqa: E402


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, architecture: Any) -> Architecture:
    """A small policy of each family."""
    return architecture(**FAMILIES[request.param])


@pytest.fixture(scope="session")
def ragged_batch() -> RolloutBatch:
    """24 rows of several packs, with log-probs that are to be filled in."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int, longest: int) -> list[list[int]]:
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        return [torch.randint(2, 40, (length,), generator=generator).tolist() for length in lengths]

    completions = draw(24, 8)
    mask = length_mask(completions)
    sequences = TokenBatch.of(draw(24, 13), completions)
    assert int(sequences.valid.sum()) > 2 * 128
    old = torch.where(mask, -3.0 + 0.1 * torch.randn(mask.shape, generator=generator), 0.0)
    return RolloutBatch(
        sequences=sequences,
        policy_mask=mask,
        rollout_logprobs=torch.where(mask, old + 0.1, 0.0),
        old_logprobs=old,
        reference_logprobs=None,
        advantages=torch.randn(24, generator=generator),
        row_mask=torch.ones(24, dtype=torch.bool),
    )
