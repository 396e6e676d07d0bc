"""The trainer in plain torch: FP32 master weights, the forward and backward of the contract."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.families import parameter_shapes
from fp8core.models.router_losses import RouterLosses
from fp8core.models.weights import (
    Formats,
    PolicyWeights,
    PreparedWeights,
    ShippedTensors,
    StoredNames,
    load_policy,
    rollout_formats,
    stored_weights,
    training_formats,
)
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.progress import tell_progress
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training import saved_state
from fp8core.training.lora import AdaptedWeights, FullWeights, LearntWeights, adapter_refusals, learning_linears
from fp8core.training.micro_batch import MicroBatchTrainer, Scores
from fp8core.training.optimisers.optimiser import Optimiser
from fp8core.training.ranks import ALONE, Ranks
from fp8core.training.registry import TrainerEntry
from fp8core.training.update_gain import Tile, UpdateGain, sampled_tiles


class ExactTrainer(MicroBatchTrainer[PolicyWeights]):
    """Exact, on a CPU: the decoder that the embedded engine runs."""

    def __init__(
        self,
        arch: Architecture,
        masters: Mapping[str, Tensor],
        formats: Formats,
        shipped_formats: Formats,
        training: TrainingConfig,
        objective: Objective,
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        super().__init__(training, objective, ranks, seed)
        self.arch = arch
        self._parts: list[list[Tensor | None]] = []
        self._policy: LearntWeights = (
            FullWeights(masters) if training.lora is None else AdaptedWeights(masters, training.lora, seed)
        )
        self._decoder = Decoder(arch, formats)
        self._bf16_decoder = Decoder(arch, replace(formats, attention=Bf16Attention(formats.points.weights)))
        self._shipped_formats = shipped_formats
        # By the formats of parameters; what is shipped and what passes read is often one.
        self._prepared_weights: dict[StoredNames, PreparedWeights] = {}
        self._optimiser = Optimiser(training.optimiser, self._policy.trainable)
        tiles = sampled_tiles(learning_linears(parameter_shapes(arch), training.lora))
        names = shipped_formats.stored_names()
        grouping = shipped_formats.recipe.weights
        # Every rank has all of them.
        self._gain = UpdateGain(tiles, self._tiles, names.of, grouping, list)

    @property
    def masters(self) -> Mapping[str, Tensor]:
        return self._policy.weights()

    def describe(self) -> dict[str, object]:
        description = self._decoder.formats.describe() | self._policy.describe()
        return {"trainer": "torch", "accumulation": "exact", **description}

    def _to_ship(self) -> ShippedTensors:
        return ShippedTensors(self._prepare(self._shipped_formats).tensors)

    def digest(self) -> str:
        return self._policy.digest()

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        weights = self._inference_weights()
        statistics = KvStatistics(self.arch.num_layers)
        slices = list(self._slices(batch))
        for index in self._ranks.own(len(slices)):
            tell_progress(index, len(slices))
            part = slices[index][1]
            observe = partial(_observe, statistics, part.valid, ())
            self._bf16_decoder.hidden(weights, part.tokens, part.positions, FullContext.of(part.valid), (), observe)
        self._ranks.combine_counts(statistics.combine)
        return statistics

    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        return batch.slices(self._config.micro_batch)

    def _no_statistics(self) -> KvStatistics:
        return KvStatistics(self.arch.num_layers)

    def _backward(self, loss: Tensor, last: bool) -> None:
        super()._backward(loss, last)
        if self._ranks.count > 1:
            # Each part's gradient is kept by itself, so that `summed` can add them as one process does.
            self._parts.append([tensor.grad for tensor in self._policy.trainable.values()])
            self._clear_gradients()

    def _finish_gradients(self) -> None:
        if self._ranks.count > 1:
            trainable = list(self._policy.trainable.values())
            for tensor, gradient in zip(trainable, self._ranks.summed(self._parts, trainable), strict=True):
                tensor.grad = gradient

    def _step(self, learning_rate: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(list(self._policy.trainable.values()), self._config.max_grad_norm))
        if math.isfinite(norm):
            gradients = {name: tensor.grad for name, tensor in self._policy.trainable.items()}
            self._optimiser.update(gradients, learning_rate)
            self._changed()
        return norm

    def _drop_gradients(self) -> None:
        self._parts = []
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for tensor in self._policy.trainable.values():
            tensor.grad = None

    def _score(
        self,
        weights: PolicyWeights,
        batch: TokenBatch,
        temperature: float,
        scales: Scales,
        statistics: KvStatistics | None = None,
        losses: RouterLosses | None = None,
    ) -> Scores:
        observe = None if statistics is None else partial(_observe, statistics, batch.valid, scales)
        return self._decoder.completion_logprobs(weights, batch, temperature, scales, observe, losses)

    def _prepare(self, formats: Formats) -> PreparedWeights:
        names = formats.stored_names()
        grouping = formats.recipe.weights
        if names not in self._prepared_weights:
            tensors = stored_weights(self._policy.weights(), names, grouping)
            self._prepared_weights[names] = PreparedWeights(tensors, grouping)
        return self._prepared_weights[names]

    def _tiles(self, tiles: Sequence[Tile]) -> list[Tensor]:
        weights = self._policy.weights()
        return [tile.cut(weights[tile.name]) for tile in tiles]

    def _trainable(self) -> Mapping[str, Tensor]:
        return self._policy.trainable

    def _changed(self) -> None:
        self._prepared_weights = {}
        self._policy.changed()

    def _inference_weights(self) -> PolicyWeights:
        return load_policy(self.arch, self._prepare(self._decoder.formats))

    def _other_weights(self) -> Mapping[str, Tensor] | None:
        same = self._decoder.formats.stored_names() == self._shipped_formats.stored_names()
        return None if same else self._prepare(self._decoder.formats).tensors

    def _engine_weights(self, engine_weights: Mapping[str, Tensor]) -> PolicyWeights:
        return load_policy(self.arch, PreparedWeights(engine_weights, self._shipped_formats.recipe.weights))

    def _training_weights(self) -> PolicyWeights:
        return load_policy(self.arch, self._prepare(self._decoder.formats), self._policy.weights())

    def save(self, folder: Path) -> None:
        if self._ranks.rank == 0:
            trainable = {name: tensor.detach().clone() for name, tensor in self._policy.trainable.items()}
            try:
                save_file(trainable, folder / saved_state.MASTERS)
                save_file(
                    {name: each.contiguous() for name, each in self._optimiser.state.items()},
                    folder / saved_state.OPTIMISER,
                )
            except SafetensorError as error:
                raise OSError(f"{folder}: {error}") from error
            saved_state.write_state(folder, self.version, self._updates, self.digest(), self._policy.base)

    def load(self, folder: Path) -> None:
        state = saved_state.read_state(folder)
        saved_state.check_base(folder, self._policy.base, state)
        tensors = saved_state.read_tensors(folder / saved_state.MASTERS)
        moments = saved_state.read_tensors(folder / saved_state.OPTIMISER)
        saved_state.check_shapes(folder / saved_state.MASTERS, tensors, self._policy.trainable)
        saved_state.check_shapes(folder / saved_state.OPTIMISER, moments, self._optimiser.like(moments))
        self._optimiser.state = dict(moments)
        for name, tensor in self._policy.trainable.items():
            tensor.data.copy_(tensors[name])
        self._changed()
        self.version = state.version
        self._updates = state.updates
        saved_state.check_digest(folder, self.digest(), state)


def _observe(
    statistics: KvStatistics, valid: Tensor, scales: Scales, layer: int, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    statistics.observe(layer, qkv, valid, scales[layer] if scales else None)


def _build(config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks) -> ExactTrainer:
    formats, engine_formats = (side(config.precision, arch.num_layers) for side in (training_formats, rollout_formats))
    objective = Objective(config.loss, config.correction)
    return ExactTrainer(arch, masters, formats, engine_formats, config.training, objective, ranks, config.seed)


TRAINER = TrainerEntry(
    name="exact",
    is_chosen=lambda training: training.trainer == "torch" and not training.computes_packed,
    build=_build,
    arithmetic="exact",
    scores_updates=True,
    device=lambda _: "cpu",
    requirements=lambda: "exact FP8 emulation on this CPU",
    check_model=lambda config, arch: adapter_refusals(arch, config.training.lora),
)
