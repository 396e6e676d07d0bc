"""Supervised warm start: a model from scratch learns the task's two styles before GRPO chooses between them.

Every precision of a comparison starts from the same policy. Here on a CPU the warm start is computed in FP32, whatever
the contract. A resident trainer that takes it over (`warm_start_by`) is built for formats of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.config.run import WarmStartConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.logprobs import token_logprobs
from fp8core.rl.batch import TokenBatch
from fp8core.training.trainer import NotFiniteError, SftTrainer

_MAX_GRAD_NORM = 1.0
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TokenisedDemonstration:
    """Prompt and completion as token ids; the completion ends with the end-of-sequence token."""

    prompt: Sequence[int]
    completion: Sequence[int]


def warm_start_by(
    trainer: SftTrainer,
    config: WarmStartConfig,
    batch: Callable[[int], Sequence[TokenisedDemonstration]],
    progress: Callable[[int, float], None],
) -> dict[str, Tensor]:
    """`warm_start` by the updates of a trainer, which begins with the initial weights; the same schedule and batches.

    Returns:
        FP32 weights on the CPU.

    Raises:
        NotFiniteError: the loss became NaN or infinite, or the trainer refused an update.
    """
    for step in range(config.steps):
        rows = batch(step)
        tokens = TokenBatch.of([row.prompt for row in rows], [row.completion for row in rows])
        loss = trainer.sft_step(tokens, _learning_rate(config, step))
        if not math.isfinite(loss):
            raise NotFiniteError(f"warm start, step {step}: the loss is {loss}")
        progress(step, loss)
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in trainer.masters.items()}


def warm_start(
    arch: Architecture,
    initial: Mapping[str, Tensor],
    config: WarmStartConfig,
    batch: Callable[[int], Sequence[TokenisedDemonstration]],
    progress: Callable[[int, float], None],
) -> dict[str, Tensor]:
    """Train on demonstrations with AdamW and a cosine schedule.

    Args:
        arch: shape of the decoder.
        initial: FP32 weights; not modified.
        config: steps, batch size, learning rate.
        batch: demonstrations of a step.
        progress: called after each step with its index and the mean cross-entropy (nats a token).

    Returns:
        FP32 weights.

    Raises:
        NotFiniteError: the loss or the gradient norm became NaN or infinite.
    """
    masters = {name: tensor.clone().requires_grad_(True) for name, tensor in initial.items()}
    decoder = Decoder(arch, reference_formats(arch.num_layers))
    optimiser = torch.optim.AdamW(list(masters.values()), lr=config.learning_rate, betas=_BETAS, weight_decay=0.0)
    for step in range(config.steps):
        optimiser.param_groups[0]["lr"] = _learning_rate(config, step)
        loss = _cross_entropy(decoder, masters, batch(step))
        if not math.isfinite(loss.item()):
            raise NotFiniteError(f"warm start, step {step}: the loss is {loss.item()}")
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), _MAX_GRAD_NORM)
        if not math.isfinite(norm.item()):
            raise NotFiniteError(f"warm start, step {step}: the gradient norm is {norm.item()}")
        optimiser.step()
        progress(step, loss.item())
    return {name: tensor.detach() for name, tensor in masters.items()}


def _learning_rate(config: WarmStartConfig, step: int) -> float:
    """A cosine to 0 over the run, after a warm-up of a twentieth of it."""
    warm = max(1, config.steps // 20)
    share = min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * share


def _cross_entropy(
    decoder: Decoder, masters: Mapping[str, Tensor], demonstrations: Sequence[TokenisedDemonstration]
) -> Tensor:
    """Mean over completion tokens; rows of one length go together, so that no padding is computed."""
    formats = decoder.formats
    weights = load_policy(decoder.arch, stored_weights(masters, formats.stored_names(), formats.scale_rule), masters)
    total, tokens = torch.zeros(()), 0
    for rows in _by_length(demonstrations):
        batch = TokenBatch.of([row.prompt for row in rows], [row.completion for row in rows])
        context = FullContext.of(batch.valid)
        hidden = decoder.hidden(weights, batch.tokens, batch.positions, context, scales=None)
        written = batch.completion[:, 1:]
        logprobs, _ = token_logprobs(
            hidden[:, :-1][written], weights.head, formats.head, batch.tokens[:, 1:][written], temperature=1.0
        )
        total, tokens = total - logprobs.sum(), tokens + logprobs.numel()
    return total / tokens


def _by_length(demonstrations: Sequence[TokenisedDemonstration]) -> list[list[TokenisedDemonstration]]:
    """Two halves at most: rows at or below the mean length, and longer ones."""
    lengths = [len(row.prompt) + len(row.completion) for row in demonstrations]
    middle = sum(lengths) / len(lengths)
    short = [row for row, length in zip(demonstrations, lengths, strict=True) if length <= middle]
    long = [row for row, length in zip(demonstrations, lengths, strict=True) if length > middle]
    return [rows for rows in (short, long) if rows]
