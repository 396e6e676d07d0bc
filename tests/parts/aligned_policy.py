"""A policy that aligned engines and the packed trainer compute on a GPU, for tests/gpu and tests/sglang."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from generation_cases import Found, collect
from torch import Tensor

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, stored_weights, training_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.truncation import Truncation
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.engine import PolicyScales, PromptGroup, Sampling
from fp8core.run.policy import check_report
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

CONTRACT = PrecisionContract(rounding_points="kernels")
ARCH = Architecture(
    family="qwen3",
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=8192,
    rope_scaling=None,
    tie_embeddings=False,
)
SCALES = PolicyScales(3, tuple(LayerScales(2.0 ** -(4 + i % 2), 0.03125, 0.0625) for i in range(ARCH.num_layers)))
LONGEST, WRITTEN = 5120, 48
_ROLLOUT = rollout_formats(CONTRACT, ARCH.num_layers)


def sharp_weights(arch: Architecture) -> dict[str, Tensor]:
    """Weights sharp enough to have favourites."""
    return {name: w * 2 if w.dim() == 2 else w for name, w in initial_weights(arch, seed=0).items()}


def packed_trainer(arch: Architecture, masters: Mapping[str, Tensor], longest: int = LONGEST) -> PackedTrainer:
    """`longest`: the engine's longest request."""
    formats = PackedFormats(training_formats(CONTRACT, ARCH.num_layers), _ROLLOUT, longest)
    objective = Objective(LossConfig(), CorrectionConfig())
    return PackedTrainer(arch, masters, formats, TrainingConfig(), objective, torch.device("cuda"))


def shipped_tensors(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = stored_weights(masters, _ROLLOUT.stored_names(), CONTRACT.recipe.weights)
    return {name: tensor.cuda() for name, tensor in stored.items()}


def update(engine: Any, tensors: dict[str, Tensor]) -> None:
    """Tensors that are proved to have arrived."""
    report = engine.update(tensors, SCALES, SCALES.version)
    check_report(report, policy_digest(tensors), SCALES, SCALES.version)


def request(number: int, length: int) -> PromptGroup:
    """A prompt of random tokens, for one completion."""
    tokens = torch.randint(0, ARCH.vocab_size, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return PromptGroup(number, f"{number}", tuple(tokens), (0,), (1000 + number,))


# A length that no block or page of a cache divides; with what is written it ends in the second partition of the keys.
PROBE = request(0, 4070)


def completions(
    engine: Any,
    requests: Sequence[PromptGroup],
    temperature: float,
    tokens: int = WRITTEN,
    truncation: Truncation | None = None,
) -> Found:
    return collect(engine, requests, Sampling(temperature, tokens, frozenset(), truncation=truncation))


def scored(
    trainer: PackedTrainer,
    requests: Sequence[PromptGroup],
    found: Found,
    temperature: float,
    truncation: Truncation | None = None,
) -> list[list[float]]:
    """The trainer's log-probs of all tokens; at temperature 0 those of 1."""
    tokens = [done.tokens for done in found]
    batch = TokenBatch.of([list(each.prompt) for each in requests], tokens, truncation=truncation)
    rows = trainer.logprobs(batch, temperature or 1.0, SCALES.layers).logprobs
    return [row[: len(written)].tolist() for row, written in zip(rows, tokens, strict=True)]
