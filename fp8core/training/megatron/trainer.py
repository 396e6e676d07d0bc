"""The trainer in Megatron Core: its layers, parallelism and optimiser; batches, loss and scales are ours.

Every process of the grid makes the same calls with the same batches; data-parallel ones take packs in turn."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_rank, get_world_size

from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.router_losses import router_metrics
from fp8core.models.weights import ShippedTensors, rollout_formats, stored_weights
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.losses import Denominator
from fp8core.rl.objective import MAXIMA, Objective, ObjectiveTerms, merge_totals
from fp8core.store.manifest import installed_version
from fp8core.training.megatron import parallel
from fp8core.training.megatron.arguments import check_scale_rule
from fp8core.training.megatron.conversion import token_multiple
from fp8core.training.megatron.optimiser import MegatronOptimiser
from fp8core.training.megatron.parallel import joint_digest
from fp8core.training.megatron.policy import CountedPack, MegatronPolicy
from fp8core.training.packing import packs
from fp8core.training.ranks import Ranks, together
from fp8core.training.saved_state import SHARDS, STATE, check_digest, read_state
from fp8core.training.trainer import PolicyTrainer, ScoredBatch, align_left

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
        ranks: Ranks,
        seed: int = 0,
    ) -> None:
        """Raises UserError: Transformer Engine follows another scale rule than the contract's."""
        super().__init__(training, objective, seed)
        self.arch = arch
        self._contract = contract
        self._ranks = ranks
        parallel.join(training.megatron, ranks.count, device)
        self._policy = MegatronPolicy(arch, contract, training.megatron, device, training.deterministic)
        if contract.training.linear == "fp8_block":
            check_scale_rule(contract.recipe.weights.rule)
        self._policy.load(masters)
        self._optimiser = MegatronOptimiser(self._policy.model, training)

    @property
    def masters(self) -> dict[str, Tensor]:
        """The policy by Hugging Face name, in BF16 (`MegatronPolicy.whole`)."""
        return self._policy.whole(self._policy.parameters())

    def describe(self) -> dict[str, object]:
        versions = {name: installed_version(name) for name in ("megatron-core", "transformer-engine")}
        rule = self._contract.scale_rule
        description = {"trainer": "megatron", "versions": versions, "scale_rule": rule, "ranks": get_world_size()}
        return description | self._policy.describe()

    def export(self) -> ShippedTensors:
        """Weights for the rollout engine, quantised here and nowhere else, in the Hugging Face layout."""
        formats = rollout_formats(self._contract, self.arch.num_layers)
        names = formats.stored_names()
        tiles = formats.recipe.weights
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.masters.items():
            parts = stored_weights({name: tensor.to(self._policy.device)}, names, tiles)
            tensors |= {key: value.to(tensor.device) for key, value in parts.items()}
        return ShippedTensors(tensors)

    def digest(self) -> str:
        """Digest of the FP32 masters of all processes, in the order of their ranks."""
        return joint_digest(self._optimiser.masters())

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        statistics = KvStatistics(self.arch.num_layers, self._policy.device)
        shape = (len(batch), int(batch.response_mask.sum(-1).max()))
        scores = torch.zeros(2, *shape)

        def fill(micro_batch: CountedPack, *values: Tensor) -> None:
            if micro_batch.counts:
                rows = micro_batch.pack.rows
                mask = align_left(batch.response_mask[rows], shape[1])
                for into, part in zip(scores, values, strict=True):
                    into[rows] = into[rows].masked_scatter(mask, part.cpu())

        self._observe(batch, temperature, statistics, scales, fill)
        scores = self._sum_over_ranks(scores).masked_fill(~align_left(batch.response_mask, shape[1]), torch.nan)
        return ScoredBatch(scores[0], scores[1], statistics)

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        statistics = KvStatistics(self.arch.num_layers, self._policy.device)
        self._observe(batch, 1.0, statistics, (), lambda *_: None)
        return statistics

    def _observe(
        self,
        batch: TokenBatch,
        temperature: float,
        statistics: KvStatistics,
        scales: Scales,
        on_score: Callable[[CountedPack, Tensor, Tensor], None],
    ) -> None:
        self._policy.model.train(False)
        with self._policy.observed(statistics, scales):
            for pack in self._own_packs(batch):
                on_score(pack, *self._policy.head(pack, self._policy.hidden(pack), temperature))
        statistics.combine(partial(all_reduce, op=ReduceOp.MAX), all_reduce)

    def _step(self, learning_rate: float) -> float:
        norm = self._optimiser.finish()
        if math.isfinite(norm):
            self._optimiser.step(norm, learning_rate)
        return norm

    def _trainable(self) -> Mapping[str, Tensor]:
        return self._optimiser.masters()

    def _changed(self) -> None:
        # Megatron gives the masters to the model at the end of an update: this one adds nothing.
        self._optimiser.clear()
        self._optimiser.step(self._optimiser.finish(), 0.0)

    def _drop_gradients(self) -> None:
        self._optimiser.clear()

    def _accumulate(self, batch: RolloutBatch, temperature: float, scales: Scales) -> dict[str, float]:
        denominator = Denominator.of(batch.loss_mask)
        totals: dict[str, float] = {}

        def loss(micro_batch: CountedPack, logprobs: Tensor, entropies: Tensor) -> Tensor:
            rows = micro_batch.pack.rows
            mask = align_left(batch.sequences.response_mask[rows], batch.loss_mask.shape[1])
            current, entropy = (torch.zeros(mask.shape).masked_scatter(mask, x.cpu()) for x in (logprobs, entropies))
            terms = self._objective(current, batch.rows(rows), denominator, entropy)
            nonlocal totals
            totals = merge_totals(
                totals, {key: value * micro_batch.counts for key, value in terms.statistics().items()}
            )
            # A pack that another process counts is computed for the experts of this one, and adds nothing.
            return terms.loss * micro_batch.counts

        # Only passes with gradients recompute.
        self._policy.model.train(True)
        routers = self._router_objective(batch)
        of_routers = list[Tensor]()
        for pack in self._own_packs(batch.sequences):
            losses = routers.part(pack.pack.rows, pack.counts)
            loss(pack, *self._policy.head(pack, self._policy.hidden(pack, losses), temperature)).backward()
            of_routers.append(losses.statistics())
        values = torch.tensor([totals.get(name, 0.0) for name in _STATISTICS], dtype=torch.float64)
        # A copy: the sum below is of the values as they are.
        largest = values.to(self._policy.device, copy=True)
        all_reduce(largest, op=ReduceOp.MAX)
        sums = dict(zip(_STATISTICS, self._sum_over_ranks(values).tolist(), strict=True))
        totals = sums | {n: v for n, v in zip(_STATISTICS, largest.tolist(), strict=True) if n in MAXIMA}
        if not math.isfinite(totals["loss"]):
            raise self._not_finite(f"the loss is {totals['loss']}")
        layers = torch.stack(of_routers).sum(0)
        return totals | router_metrics(self._sum_over_ranks(layers) if len(layers) else layers)

    def _own_packs(self, batch: TokenBatch) -> list[CountedPack]:
        """This process's packs, on its device. All processes have equally many, so some do not count."""
        megatron = self._config.megatron
        group = parallel.data_group()
        all_packs = list(packs(batch, megatron.micro_batch_tokens, token_multiple(megatron)))
        own = range(group.rank(), len(all_packs) + group.rank(), group.size())
        own_packs = (CountedPack(all_packs[min(index, len(all_packs) - 1)], index < len(all_packs)) for index in own)
        return [pack.to(self._policy.device) for pack in own_packs]

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """Over all processes, of which one in a tensor-parallel group speaks for the others; on the CPU."""
        own_values = values.to(self._policy.device) * (self._policy.rank.tensor == 0)
        all_reduce(own_values)
        return own_values.cpu()

    def save(self, folder: Path) -> None:
        self._optimiser.save(folder / SHARDS, self._policy.sharded())
        state = {"version": self.version, "updates": self._updates, "digest": self.digest(), "grid": self._grid()}
        if get_rank() == 0:
            (folder / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the grid may be another one. Raises StoredFileError."""
        # Before the first collective: a process that cannot read it would leave the others waiting.
        state = together(self._ranks, partial(read_state, folder))[0]
        self._optimiser.load(folder / SHARDS, self._policy.sharded())
        self.version = state.version
        self._updates = state.updates
        # The digest is that of every process's part: on another grid there are other parts.
        if state.grid == self._grid():
            check_digest(folder, self.digest(), state)

    def _grid(self) -> dict[str, int | bool]:
        names = {"tensor_parallel", "expert_parallel"}
        return {"ranks": get_world_size(), **self._config.megatron.model_dump(include=names)}


def process_trainer(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], ranks: Ranks
) -> MegatronTrainer:
    """This process's part, on the first GPU that it sees."""
    objective = Objective(config.loss, config.correction)
    device = torch.device("cuda", 0)
    return MegatronTrainer(arch, masters, config.precision, config.training, objective, device, ranks, config.seed)
