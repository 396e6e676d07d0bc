"""The trainer in Megatron Core: its layers, parallelism and optimiser; batches, loss and scales are ours.

Every process of the grid makes the same calls with the same batches; data-parallel ones take packs in turn."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather_object, all_reduce, get_rank, get_world_size

from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import Formats, ShippedTensors, rollout_formats, stored_weights
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.numerics.recipe import TILE
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import MAXIMA, Objective, ObjectiveTerms, merged
from fp8core.store.manifest import installed_version
from fp8core.training.megatron import parallel
from fp8core.training.megatron.arguments import check_scale_rule
from fp8core.training.megatron.conversion import layers_of, token_multiple
from fp8core.training.megatron.optimiser import Optimiser, OptimiserFactory, optimiser_for
from fp8core.training.megatron.parallel import joint_digest
from fp8core.training.megatron.policy import CountedPack, MegatronPolicy, TakeScores, accumulate, score
from fp8core.training.packing import packs
from fp8core.training.ranks import Ranks, together
from fp8core.training.saved_state import SHARDS, STATE, read_state, refuse_other_digest
from fp8core.training.trainer import PolicyTrainer, ScoredBatch, left_aligned
from fp8core.training.update_gain import Sums, Tile, UpdateGain, sampled_tiles

_STATISTICS = tuple(field.name for field in fields(ObjectiveTerms))


class MegatronTrainer(PolicyTrainer):
    def __init__(
        self,
        arch: Architecture,
        masters: Mapping[str, Tensor],
        contract: PrecisionContract,
        training: TrainingConfig,
        objective: Objective,
        device: torch.device,
        optimise: OptimiserFactory,
        ranks: Ranks,
    ) -> None:
        """Raises UserError: Transformer Engine follows another scale rule than the contract's."""
        super().__init__(training, objective)
        self.arch, self._contract, self._ranks = arch, contract, ranks
        parallel.join(training.megatron, ranks.count, device)
        self._policy = MegatronPolicy(arch, contract, training.megatron, device, training.deterministic)
        if contract.training.linear == "fp8_block":
            check_scale_rule(contract.recipe.weights.rule)
        self._policy.load(masters)
        self._optimiser = optimise(self._policy.model, training)
        self._gain = update_gain(self._policy, self._optimiser, rollout_formats(contract, arch.num_layers), ranks)

    @property
    def masters(self) -> dict[str, Tensor]:
        """The policy by Hugging Face name, as it is multiplied: in BF16, on a CPU in FP32 (`MegatronPolicy.whole`)."""
        return self._policy.whole(self._policy.parameters())

    def describe(self) -> dict[str, object]:
        versions = {name: installed_version(name) for name in ("megatron-core", "transformer-engine")}
        rule = self._contract.scale_rule
        found = {"trainer": "megatron", "versions": versions, "scale_rule": rule, "ranks": get_world_size()}
        return found | self._policy.describe()

    def export(self) -> ShippedTensors:
        """Weights for the rollout engine, quantised here and nowhere else, in the Hugging Face layout."""
        formats = rollout_formats(self._contract, self.arch.num_layers)
        names, tiles = formats.stored_names(), formats.recipe.weights
        stored: dict[str, Tensor] = {}
        for name, tensor in self.masters.items():
            made = stored_weights({name: tensor.to(self._policy.device)}, names, tiles)
            stored |= {key: value.to(tensor.device) for key, value in made.items()}
        return ShippedTensors(stored)

    def digest(self) -> str:
        """Digest of the FP32 masters of all processes, in the order of their ranks."""
        return joint_digest(self._optimiser.masters())

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        statistics = KvStatistics(self.arch.num_layers, self._policy.device)
        shape = (len(batch), int(batch.completion.sum(-1).max()))
        found = torch.zeros(2, *shape)

        def fill(micro_batch: CountedPack, *values: Tensor) -> None:
            if micro_batch.counts:
                rows = micro_batch.pack.rows
                mask = left_aligned(batch.completion[rows], shape[1])
                for into, part in zip(found, values, strict=True):
                    into[rows] = into[rows].masked_scatter(mask, part.cpu())

        self._observe(batch, temperature, statistics, scales, fill)
        found = self._summed(found).masked_fill(~left_aligned(batch.completion, shape[1]), torch.nan)
        return ScoredBatch(found[0], found[1], statistics)

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        statistics = KvStatistics(self.arch.num_layers, self._policy.device)
        self._observe(batch, 1.0, statistics, (), lambda *_: None)
        return statistics

    def _observe(
        self, batch: TokenBatch, temperature: float, statistics: KvStatistics, scales: Scales, scored: TakeScores
    ) -> None:
        with self._policy.observed(statistics, scales):
            score(self._policy, self._own_packs(batch), temperature, scored)
        statistics.combine(partial(all_reduce, op=ReduceOp.MAX), all_reduce)

    def _step(self, learning_rate: float) -> float:
        norm = self._optimiser.finish()
        if math.isfinite(norm):
            self._optimiser.step(norm, learning_rate)
        return norm

    def _drop_gradients(self) -> None:
        self._optimiser.clear()

    def _accumulate(self, batch: RolloutBatch, temperature: float, scales: Scales) -> dict[str, float]:
        denominator = Denominator.of(batch.mask)
        totals: dict[str, float] = {}

        def loss(micro_batch: CountedPack, logprobs: Tensor, entropies: Tensor) -> Tensor:
            rows = micro_batch.pack.rows
            mask = left_aligned(batch.sequences.completion[rows], batch.mask.shape[1])
            current, entropy = (torch.zeros(mask.shape).masked_scatter(mask, x.cpu()) for x in (logprobs, entropies))
            terms = self._objective(current, batch.rows(rows), denominator, entropy)
            nonlocal totals
            totals = merged(totals, {key: value * micro_batch.counts for key, value in terms.statistics().items()})
            # A pack that another process counts is computed for the experts of this one, and adds nothing.
            return terms.loss * micro_batch.counts

        accumulate(self._policy, self._own_packs(batch.sequences), temperature, loss)
        totals = self._merged_over_processes(totals)
        if not math.isfinite(totals["loss"]):
            raise self._not_finite(f"the loss is {totals['loss']}")
        return totals

    def _merged_over_processes(self, own: Mapping[str, float]) -> dict[str, float]:
        values = torch.tensor([own.get(name, 0.0) for name in _STATISTICS], dtype=torch.float64)
        # A copy: the sum below is of the values as they are.
        largest = values.to(self._policy.device, copy=True)
        all_reduce(largest, op=ReduceOp.MAX)
        found = dict(zip(_STATISTICS, self._summed(values).tolist(), strict=True))
        return found | {n: v for n, v in zip(_STATISTICS, largest.tolist(), strict=True) if n in MAXIMA}

    def _own_packs(self, batch: TokenBatch) -> list[CountedPack]:
        """This process's packs. All processes have equally many, so some do not count; all stages have the same."""
        megatron, group = self._config.megatron, parallel.data_group()
        found = list(packs(batch, megatron.micro_batch_tokens, token_multiple(megatron)))
        own = range(group.rank(), len(found) + group.rank(), group.size())
        return [CountedPack(found[min(index, len(found) - 1)], index < len(found)) for index in own]

    def _summed(self, values: Tensor) -> Tensor:
        """Over all processes, of which one in a tensor-parallel group speaks for the others; on the CPU."""
        moved = values.to(self._policy.device) * (self._policy.rank.tensor == 0)
        all_reduce(moved)
        return moved.cpu()

    def save(self, folder: Path) -> None:
        self._optimiser.save(folder / SHARDS, self._policy.sharded())
        state = {"version": self.version, "updates": self._updates, "digest": self.digest(), "grid": self._grid()}
        if get_rank() == 0:
            (folder / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the grid may be another one. Raises StoredFileError."""
        # Before the first collective: a process that cannot read it would leave the others waiting.
        state = together(self._ranks, partial(read_state, folder))[0]
        self._optimiser.load(folder / SHARDS, self._policy.sharded(), state.updates)
        self.version, self._updates = state.version, state.updates
        # The digest is that of every process's part: on another grid there are other parts.
        if state.grid == self._grid():
            refuse_other_digest(folder, self.digest(), state)

    def _grid(self) -> dict[str, int | bool]:
        names = {"tensor_parallel", "pipeline_parallel", "expert_parallel", "distributed_optimizer"}
        return {"ranks": get_world_size(), **self._config.megatron.model_dump(include=names)}


def process_trainer(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks
) -> MegatronTrainer:
    """This process's part, on the first GPU that it sees, or on the CPU of a machine without."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return MegatronTrainer(
        arch,
        masters,
        config.precision,
        config.training,
        Objective(config.loss, config.correction),
        device,
        optimiser_for(device),
        ranks,
    )


def update_gain(policy: MegatronPolicy, optimiser: Optimiser, formats: Formats, ranks: Ranks) -> UpdateGain:
    """Of the policy as it is now, whose linears are cut into tiles as its GEMMs do it.

    Of experts it looks at those of the first data-parallel processes.
    """
    shapes = {n: tuple(p.shape) for n, p in policy.parameters().items() if "linear_" in n and p.dim() == 2}
    layers, stored = layers_of(policy.arch, policy.megatron, policy.rank.pipeline), formats.stored_names().layers

    def joined(own: list[Sums]) -> list[Sums]:
        # Other data-parallel processes have the same.
        return ranks.joined(own if parallel.data_group().rank() == 0 else [])

    return UpdateGain(
        sampled_tiles(shapes),
        _Masters(optimiser, shapes).tiles,
        lambda name: stored[layers[int(name.split(".layers.")[1].split(".")[0])]].qkv,
        formats.recipe.weights,
        joined,
    )


class _Masters:
    """The masters of this process's linears, of which a distributed optimiser has a flat part."""

    def __init__(self, optimiser: Optimiser, shapes: dict[str, tuple[int, ...]]) -> None:
        self._optimiser, self._shapes = optimiser, shapes
        self._firsts: dict[str, int] = {}
        for experts in (False, True):
            # Each process has a contiguous part, in the order of the ranks.
            own = optimiser.updated().items()
            sizes = {name: len(part) for name, part in own if optimiser.is_expert(name) == experts}
            group = _group(experts)
            found = [sizes] * group.size()
            all_gather_object(found, sizes, group=group)
            self._firsts |= {name: sum(each[name] for each in found[: group.rank()]) for name in sizes}

    def tiles(self, tiles: Sequence[Tile]) -> list[Tensor]:
        """Whole ones, FP32; all processes ask together."""
        own = self._optimiser.updated()
        return [self._tile(tile, own[tile.name]) for tile in tiles]

    def _tile(self, tile: Tile, part: Tensor) -> Tensor:
        rows, columns = self._shapes[tile.name]
        if len(part) == rows * columns:
            return tile.cut(part.view(rows, columns))
        first, stop = tile.row * columns, min(rows, tile.row + TILE) * columns
        band = torch.zeros(stop - first, device=part.device)
        shift = self._firsts[tile.name] - first
        start, end = max(0, shift), min(len(band), shift + len(part))
        if start < end:
            band[start:end] = part[start - shift : end - shift]
        cut = tile.cut(band.view(-1, columns), tile.row).contiguous()
        all_reduce(cut, group=_group(self._optimiser.is_expert(tile.name)))
        return cut


def _group(experts: bool) -> ProcessGroup:
    group: ProcessGroup = parallel_state.get_expert_data_parallel_group() if experts else parallel.data_group()
    return group
