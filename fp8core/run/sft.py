"""Supervised training of the warm start: the schedule of every trainer, and the trainer that computes in FP32."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fp8core.config.run import WarmStartConfig
from fp8core.data.demonstrations import Draw, demonstrated
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.rl.batch import TokenBatch
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.training.exact import AdamW
from fp8core.training.trainer import NotFiniteError, SftTrainer

_MAX_GRAD_NORM = 1.0
_BETAS = (0.9, 0.95)


def train_on_demonstrations(
    trainer: SftTrainer, config: WarmStartConfig, batch: Draw, progress: Callable[[int, float], None]
) -> None:
    """Train with a cosine schedule; `progress` hears each step's index and mean cross-entropy (nats a token).

    Raises NotFiniteError: the loss or the gradient norm became NaN or infinite.
    """
    for step in range(config.steps):
        try:
            loss = trainer.sft_step(demonstrated(batch(step)), _learning_rate(config, step))
        except NotFiniteError as error:
            raise NotFiniteError(f"warm start, step {step}: {error}") from error
        if not math.isfinite(loss):
            raise NotFiniteError(f"warm start, step {step}: the loss is {loss}")
        progress(step, loss)


def _learning_rate(config: WarmStartConfig, step: int) -> float:
    """A cosine to 0 over the run, after a warm-up of a twentieth of it."""
    warm = max(1, config.steps // 20)
    share = min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * share


class ReferenceSftTrainer:
    """AdamW on FP32 weights, through the decoder in its reference formats; satisfies `SftTrainer`."""

    def __init__(self, arch: Architecture, initial: Mapping[str, Tensor]) -> None:
        """`initial`: FP32 weights, which are copied."""
        self._masters = {name: tensor.float().clone().requires_grad_(True) for name, tensor in initial.items()}
        self._decoder = Decoder(arch, reference_formats(arch.num_layers))
        self._optimiser = AdamW(self._masters, _BETAS, weight_decay=0.0)

    @property
    def masters(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._masters.items()}

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        """As `SftTrainer.sft_step`; a loss that is not finite is returned and not learnt from.

        Raises NotFiniteError: the gradient norm is NaN or infinite.
        """
        loss = self._cross_entropy(batch)
        if not math.isfinite(loss.item()):
            return loss.item()
        self._optimiser.drop_gradients()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self._masters.values()), _MAX_GRAD_NORM)
        if not math.isfinite(norm.item()):
            raise NotFiniteError(f"the gradient norm is {norm.item()}")
        self._optimiser.step(learning_rate)
        return loss.item()

    def store_weights(self, store: ArtifactStore) -> Ref:
        return store.put_tensors("weights", self.masters)

    def close(self) -> None:
        """As `SftTrainer.close`: it holds no device."""

    def _cross_entropy(self, batch: TokenBatch) -> Tensor:
        """Mean over completion tokens."""
        formats = self._decoder.formats
        stored = stored_weights(self._masters, formats.stored_names(), formats.recipe.weights)
        weights = load_policy(self._decoder.arch, stored, self._masters)
        total, tokens = torch.zeros(()), 0
        for part in _by_length(batch):
            logprobs, _ = self._decoder.completion_logprobs(weights, part, temperature=1.0)
            total, tokens = total - logprobs.sum(), tokens + logprobs.numel()
        return total / tokens


def _by_length(batch: TokenBatch) -> Iterator[TokenBatch]:
    """Two halves at most, so that little padding is computed: rows at or below the mean length, and longer ones."""
    lengths = batch.valid.sum(dim=1)
    short = lengths <= lengths.double().mean()
    for chosen in (short, ~short):
        if chosen.any():
            yield batch.part(chosen.nonzero()[:, 0].tolist(), int(lengths[chosen].max()))
