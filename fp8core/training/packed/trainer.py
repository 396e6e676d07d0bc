"""The trainer on a GPU: packed sequences, block-FP8 GEMMs on codes, fused FP32 masters.

It computes what `exact.ExactTrainer` defines: on a CPU log-probs are equal bit for bit (rounding points `kernels`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import torch
from torch import Tensor

from fp8core.config.training import OptimiserConfig, TrainingConfig
from fp8core.kernels import attention_backward
from fp8core.models.architecture import Architecture
from fp8core.models.router_losses import RouterLosses
from fp8core.models.safetensors_files import StoredSpec, create_file, write_rows
from fp8core.models.weights import Formats, ShippedTensors, in_one_buffer, layer_of
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.e4m3 import FiniteFlag
from fp8core.numerics.elementwise import KERNELS
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.numerics.logprobs import chunked_logprobs
from fp8core.numerics.packed import PackedAttention, PackedHead, packed_length
from fp8core.resources.memory import Shapes, count_parameters
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.training.lora import learning_linears
from fp8core.training.micro_batch import MicroBatchTrainer, Scores
from fp8core.training.optimisers.optimiser import Update, find_optimiser, rules_of
from fp8core.training.packed.adapted import AdaptedMasters, PackedMasters
from fp8core.training.packed.blocks import Bf16Blocks, Blocks, Fp8Blocks, InvariantBf16Blocks
from fp8core.training.packed.context import PackShare
from fp8core.training.packed.decoder import PackedDecoder
from fp8core.training.packed.layer import Observer
from fp8core.training.packed.masters import Masters, PassMasters, balance
from fp8core.training.packing import even_groups
from fp8core.training.ranks import ALONE, Ranks, Teams, together
from fp8core.training.saved_state import (
    MASTERS,
    OPTIMISER,
    SavedState,
    check_base,
    check_digest,
    header_of,
    read_state,
    write_state,
)
from fp8core.training.trainer import ScoredBatch
from fp8core.training.update_gain import UpdateGain, sampled_tiles


@dataclass(frozen=True)
class PackedFormats:
    """`longest`: tokens of the engine's longest request."""

    training: Formats
    rollout: Formats
    longest: int


class PackedTrainer(MicroBatchTrainer[Tensor]):
    """Holds the masters of one policy on one device; the weights of a pass are the head's, BF16."""

    def __init__(
        self,
        arch: Architecture,
        masters: Mapping[str, Tensor],
        formats: PackedFormats,
        training: TrainingConfig,
        objective: Objective,
        device: torch.device,
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        super().__init__(training, objective, ranks, seed)
        self._neighbours = ranks.neighbours(training.context_parallel)
        self._teams = Teams(ranks, self._neighbours.count)
        self.arch = arch
        self._formats = formats
        self._device = device
        self._flag = FiniteFlag(device)
        names = [linear.name for linear in formats.training.linears]
        blocks: dict[str, Blocks] = {
            "fp8_block": Fp8Blocks(formats.training.recipe, self._flag),
            "bf16": Bf16Blocks() if "fp8_block" not in names else InvariantBf16Blocks(),
        }
        linears = [blocks[name] for name in names]
        self._masters: PackedMasters
        if training.lora is not None:
            self._masters = AdaptedMasters(arch, masters, training.lora, seed, device, ranks)
        elif training.reduce_gradients == "per_pass" and ranks.count > 1:
            self._masters = PassMasters(arch, masters, device, ranks)
        else:
            self._masters = Masters(arch, masters, device, ranks)
        recompute = training.activation_checkpointing
        keep = self._masters.kept
        self._decoder = PackedDecoder(arch, linears, device, recompute, keep)
        for name, collector in self._decoder.named_parameters():
            collector.requires_grad_(self._masters.collects(name))
        bf16 = Bf16Attention(formats.training.points.weights)
        forms = formats.training.attention, bf16
        self._attention, self._attention_without_scales = (PackedAttention(form, formats.longest) for form in forms)
        self._gradients: dict[str, Tensor] = {}
        self._optimiser = InPlaceOptimiser(training.optimiser, self._masters.trainable(), self._masters.learnt_shapes)
        tiles = sampled_tiles(learning_linears(self._masters.shapes, training.lora))
        own = [tile for tile in tiles if tile.row in self._masters.rows_of(tile.name)]
        stored = formats.rollout.stored_names()
        grouping = formats.rollout.recipe.weights
        self._gain = UpdateGain(own, self._masters.tiles, stored.of, grouping, ranks.joined)

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """FP32 on one rank, or of several ranks BF16 on the host of rank 0; others get none."""
        own = self._masters.named()
        if self._ranks.count == 1:
            return own
        whole = dict[str, Tensor]()
        for _, names in groupby(own, layer_of):
            # A whole policy would not fit on a GPU beside an engine that is awake.
            layer = self._masters.joined({name: own[name].bfloat16() for name in names})
            whole |= {name: tensor.cpu() for name, tensor in layer.items() if self._ranks.rank == 0}
        return whole

    def store_weights(self, store: ArtifactStore) -> Ref:
        assert self._ranks.count == 1, "one rank trains the warm start, and has all in FP32"
        return store.put_tensors("weights", self._masters.named())

    def describe(self) -> dict[str, object]:
        description: dict[str, object] = {"trainer": "torch", "accumulation": "exact"}
        if self._device.type == "cuda":
            # The two kernels differ in bytes, and a replay can be on a host that has the other one.
            backward = attention_backward.describe(self.arch.head_dim, self._device)
            description |= {"accumulation": "hopper", "attention_backward": backward}
        # A contract may leave the points to the engine (`stepwise`); the kernels have their own.
        points = {"rounding_points": KERNELS.name}
        return {**description, **self._formats.training.describe(), **points, **self._masters.describe()}

    def _to_ship(self) -> ShippedTensors:
        stacks = self._stored(self._formats.rollout)
        # In one buffer: that is shared fast.
        copies = iter(in_one_buffer([tensor for tensors in stacks.values() for tensor in tensors]))
        return ShippedTensors(self._by_name({name: [next(copies) for _ in each] for name, each in stacks.items()}))

    def _stored(self, formats: Formats) -> dict[str, list[Tensor]]:
        """Whole parameters as they are shipped, by their names in the decoder: values, or codes and scales."""
        self._decoder.drop_weights()  # Cached weights would take memory beside it.
        names = formats.stored_names()
        blocks: dict[str, Blocks] = {"fp8_block": Fp8Blocks(formats.recipe, self._flag), "bf16": Bf16Blocks()}
        masters = self._masters
        stacks = dict[str, list[Tensor]]()
        for unit in masters.units:
            forms = {name: blocks[names.of(stack.parts[0][0])] for name, stack in unit.items()}
            stacks |= masters.gathered(
                {name: form.made(masters.own(name), masters.parts(name)) for name, form in forms.items()}
            )
        self._check_finite()
        return stacks

    def _by_name(self, stacks: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        return {
            name: part for stack, whole in stacks.items() for name, part in self._masters.split(stack, whole).items()
        }

    def digest(self) -> str:
        return self._masters.digest()

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Scales) -> ScoredBatch:
        """Raises GroupNotFinite: a linear met NaN or infinity, which kernels only note."""
        score = super().logprobs(batch, temperature, scales)
        self._check_finite()
        return score

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        self._inference_weights()
        statistics = self._no_statistics()
        slices = list(self._slices(batch))
        for index in self._teams.own(len(slices)):
            self._hidden(self._share(slices[index][1]), self._attention_without_scales, (), statistics)
        self._check_finite()
        self._ranks.combine_counts(statistics.combine)
        return statistics

    def _share(self, batch: TokenBatch) -> PackShare:
        return PackShare.of(batch, self._neighbours, self._device)

    def _hidden(
        self,
        share: PackShare,
        attention: PackedAttention,
        scales: Scales,
        statistics: KvStatistics | None,
        losses: RouterLosses | None = None,
    ) -> Tensor:
        observe: Observer | None = None
        if statistics is not None:
            valid = share.valid[None]

            def observe(layer: int, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
                q, k, v = (part.transpose(0, 1)[None] for part in qkv)
                statistics.observe(layer, (q, k, v), valid, scales[layer] if scales else None)

        hidden: Tensor = self._decoder(share.tokens, share.attention, attention, scales, observe, losses)
        return hidden

    def _score(
        self,
        weights: Tensor,
        batch: TokenBatch,
        temperature: float,
        scales: Scales,
        statistics: KvStatistics | None = None,
        losses: RouterLosses | None = None,
    ) -> Scores:
        share = self._share(batch)
        if losses is not None:
            losses.place(share.sequences, share.summed)
        with _determinism(self._config.deterministic):
            hidden = self._hidden(share, self._attention, scales, statistics, losses)
            head = PackedHead(weights, self._formats.training.head.output, temperature, batch.truncation)
            master = self._decoder.head_weight()[0]
            logprobs, entropy = chunked_logprobs(hidden[share.rows], master, head, share.targets)
            return share.joined(logprobs).cpu(), share.joined(entropy).cpu()

    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        """As many rows as make no pack longer than the micro-batch or a rank's share, one at least; those of a rank lie
        together."""
        lengths = [packed_length(length) for length in batch.valid.sum(-1).tolist()]
        share = math.ceil(sum(lengths) / self._teams.count)
        groups = even_groups(lengths, min(self._config.tokens_per_pass, share), self._teams.count)
        for index in balance([pass_cost(self.arch, lengths[rows]) for rows in groups], self._teams.count):
            rows = groups[index]
            yield rows, batch.part(rows, int(batch.valid[rows].sum(-1).max()))

    def _no_statistics(self) -> KvStatistics:
        return KvStatistics(self.arch.num_layers, self._device)

    def _inference_weights(self) -> Tensor:
        self._decoder.cache_weights(self._masters)
        return self._decoder.head_weight()[1]

    def _other_weights(self) -> dict[str, Tensor] | None:
        training = self._formats.training
        return (
            None
            if training.stored_names() == self._formats.rollout.stored_names()
            else self._by_name(self._stored(training))
        )

    def _engine_weights(self, engine_weights: Mapping[str, Tensor]) -> Tensor:
        self._decoder.drop_weights()
        self._decoder.cache_engine_weights(engine_weights, self._device)
        return self._decoder.head_weight()[1]

    def _drop_engine_weights(self) -> None:
        self._decoder.drop_weights()

    def _trainable(self) -> Mapping[str, Tensor]:
        return self._masters.trainable()

    def _changed(self) -> None:
        self._decoder.drop_weights()

    def _training_weights(self) -> Tensor:
        if self._optimiser.updates == 0:
            # Beside weights or gradients, moments would keep whole segments of theirs in torch's cache for good.
            self._decoder.drop_weights()
            self._optimiser.moments()
        return self._inference_weights()

    def _backward(self, loss: Tensor, last: bool) -> None:
        with _determinism(self._config.deterministic):
            torch.autograd.backward(loss)

    def _end_parts(self, parts: int) -> None:
        self._masters.end_passes(math.ceil(parts / self._teams.count))

    def _finish_gradients(self) -> None:
        self._gradients = self._masters.collected(dict(self._decoder.named_parameters()))

    def _step(self, learning_rate: float) -> float:
        self._check_finite()
        own = float(torch.nn.utils.get_total_norm(list(self._gradients.values())))
        norm = self._masters.whole_norm(own)
        if math.isfinite(norm):
            self._decoder.drop_weights()
            factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            self._optimiser.update(self._masters.trainable(self._gradients), learning_rate, factor)
        return norm

    def _drop_gradients(self) -> None:
        self._gradients = {}
        self._masters.drop_gradients()
        self._decoder.zero_grad(set_to_none=True)

    def rest(self) -> None:
        self._decoder.drop_weights()

    def _check_finite(self) -> None:
        self._ranks.maximum(self._flag.not_finite)
        try:
            self._flag.check()
        finally:
            self._flag.not_finite.zero_()

    def save(self, folder: Path) -> None:
        """The files do not depend on the number of ranks, each of which writes its rows."""
        # A reference never learns, and its moments would take twice the memory of its weights.
        moments = self._optimiser.moments() if self._updates else {}
        form = STORED_DTYPES[self._config.optimiser.state]
        shapes = self._masters.learnt_shapes
        digest = self.digest()
        masters = [StoredSpec(name, "F32", shape) for name, shape in shapes.items()]
        specs = [StoredSpec(name, form, shapes[name.partition("/")[2]]) for name in moments]

        def create() -> None:
            if self._ranks.rank == 0:
                create_file(folder / MASTERS, masters)
                create_file(folder / OPTIMISER, specs)
                write_state(folder, self.version, self._updates, digest, self._masters.base)

        def write() -> None:
            write_rows(folder / MASTERS, self._own_rows(self._masters.trainable()))
            write_rows(folder / OPTIMISER, self._own_rows(moments))

        for part in (create, write):
            together(self._ranks, part)

    def _own_rows(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """Masters, or moments by `moment/name`, with their first row."""
        for name, tensor in tensors.items():
            yield name, self._masters.learnt_rows(name.rpartition("/")[2]).start, tensor

    def load(self, folder: Path) -> None:
        shapes = self._masters.learnt_shapes

        def read() -> SavedState:
            state = read_state(folder)
            check_base(folder, self._masters.base, state)
            moments = self._optimiser.moments() if state.updates else {}
            wanted = {name: shapes[name.partition("/")[2]] for name in moments}
            own = {MASTERS: self._masters.trainable(), OPTIMISER: moments}
            files = {name: header_of(folder / name, each) for name, each in ((MASTERS, shapes), (OPTIMISER, wanted))}
            for file, stored in files.items():
                for name, start, tensor in self._own_rows(own[file]):
                    tensor.copy_(stored[name].rows(start, len(tensor)))
            return state

        state = together(self._ranks, read)[0]
        self._decoder.drop_weights()
        self.version = state.version
        self._updates = state.updates
        self._optimiser.go_back(state.updates)
        check_digest(folder, self.digest(), state)


def pass_cost(arch: Architecture, lengths: Sequence[int]) -> int:
    """Multiplications of a forward pass over sequences of these lengths; a token meets only its own experts."""
    counts = count_parameters(arch)
    linear_weights = counts.linear - (counts.total - counts.active)
    attention_width = arch.num_heads * arch.head_dim * arch.num_layers
    return sum(length * (linear_weights + attention_width * length) for length in lengths)


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """torch has one switch for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    settings = torch.utils.deterministic
    fill_before = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted or before)
    # Filling what is about to be overwritten costs a pass over memory and changes no result.
    settings.fill_uninitialized_memory = fill_before and not wanted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]


_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED_DTYPES = {"fp32": "F32", "bf16": "BF16"}


class InPlaceOptimiser:
    """Own rows of tensors that all learn in each update. `shapes`: of the whole tensors.

    Neighbours in memory are updated as one where their rule works by element: experts are thousands of tensors."""

    def __init__(self, settings: OptimiserConfig, masters: Mapping[str, Tensor], shapes: Shapes) -> None:
        self._masters = dict(masters)
        self._dtype = _FORMATS[settings.state]
        self._rules = rules_of(settings, shapes, "kernels")
        by_element, self._runs = find_optimiser(settings).by_element, list[list[str]]()
        for name, master in self._masters.items():
            last = self._runs[-1][-1] if by_element and self._runs else None
            if last and self._rules[name] == self._rules[last] and _follows(master, self._masters[last]):
                self._runs[-1].append(name)
            else:
                self._runs.append([name])
        self.updates = 0
        self._moments: dict[str, Tensor] | None = None

    def moments(self) -> dict[str, Tensor]:
        """By `<moment>/<name>`; the first call makes them, in memory new to torch's cache."""
        if self._moments is None:
            torch.cuda.empty_cache()
            self._moments = {}
            for run in self._runs:
                masters = [self._masters[name] for name in run]
                sizes = [master.numel() for master in masters]
                for moment in self._rules[run[0]].moments:
                    pieces = masters[0].new_zeros(sum(sizes), dtype=self._dtype).split(sizes)
                    of_run = zip(run, masters, pieces, strict=True)
                    self._moments |= {f"{moment}/{name}": piece.view_as(master) for name, master, piece in of_run}
        return self._moments

    def go_back(self, updates: int) -> None:
        self.updates = updates
        if not updates:
            self._moments = None

    def update(self, gradients: Mapping[str, Tensor], learning_rate: float, gradient_factor: float) -> None:
        self.updates += 1
        update = Update(self.updates, learning_rate, gradient_factor)
        state = self.moments()
        for run in self._runs:
            if len(master := _joined(self._masters, run)):
                rule = self._rules[run[0]]
                moments = [_joined(state, run, f"{moment}/") for moment in rule.moments]
                rule.update(master, _joined(gradients, run), moments, update)


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """True if it begins in memory where the other ends."""
    one_storage = tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    both = one_storage and tensor.is_contiguous() and before.is_contiguous()
    return both and tensor.storage_offset() == before.storage_offset() + before.numel()


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str], prefix: str = "") -> Tensor:
    """The one, or the elements of all; a copy where they are no neighbours in memory."""
    parts = [tensors[prefix + name] for name in names]
    if len(parts) == 1:
        return parts[0].contiguous()
    if all(_follows(part, before) for before, part in pairwise(parts)):
        return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
    return torch.cat([part.reshape(-1) for part in parts])
