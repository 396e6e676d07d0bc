"""The trainer on a GPU: packed sequences, block-FP8 GEMMs on codes, fused FP32 masters.

It computes what `TorchTrainer` defines, with the kernels that stand beside each reference; on a CPU every kernel is its
reference, and log-probs are then equal bit for bit (rounding points `kernels`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8core.config.run import TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.formats import Formats
from fp8core.models.weights import in_one_buffer, stored_weights
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.block_codes import FiniteFlag
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import AmaxStatistics, KvStatistics, LayerScales
from fp8core.numerics.packed_attention import Bf16PackedAttention, DevicePack, Fp8PackedAttention, PackedAttention
from fp8core.numerics.packed_head import HeadOptions, token_logprobs
from fp8core.numerics.packed_sequences import PackedSequences, packed_length
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.policy_trainer import PartwiseTrainer, Scored
from fp8core.training.torch.blocks import Bf16Blocks, Blocks, Fp8Blocks
from fp8core.training.torch.decoder import Observer, PackedDecoder, named_masters
from fp8core.training.torch.optimiser import AdamW
from fp8core.training.trainer import ScoredBatch

_MASTERS = "masters.safetensors"
_OPTIMISER = "optimiser.safetensors"
_STATE = "trainer.json"


@dataclass(frozen=True)
class PackedFormats:
    """What the two sides of a contract mean to this trainer.

    Attributes:
        training: formats of the forward; backward GEMMs follow the linears.
        rollout: formats of the weights that are exported.
        longest: tokens of the longest request of the engine whose FP8 attention is computed.
        amax_only: whether calibration needs no histogram of Q, K and V.
    """

    training: Formats
    rollout: Formats
    longest: int
    amax_only: bool


class PackedTrainer(PartwiseTrainer[Tensor]):
    """Holds the masters of one policy on one device; the weights of a pass are the head's, BF16."""

    def __init__(
        self,
        arch: Architecture,
        masters: Mapping[str, Tensor],
        formats: PackedFormats,
        training: TrainingConfig,
        objective: Objective,
        device: torch.device,
    ) -> None:
        super().__init__(training, objective)
        self.arch, self._formats, self._device = arch, formats, device
        self._flag = FiniteFlag(device)
        blocks: dict[str, Blocks] = {
            "fp8_block": Fp8Blocks(formats.training.scale_rule, self._flag),
            "bf16": Bf16Blocks(),
        }
        linears = [blocks[layer.qkv.name] for layer in formats.training.layers]
        self._decoder = PackedDecoder(arch, linears, device, training.activation_checkpointing)
        bf16 = Bf16PackedAttention(Bf16Attention(formats.training.points.weights))
        attention: dict[str, PackedAttention] = {"fp8": Fp8PackedAttention(formats.longest), "bf16": bf16}
        self._attention, self._unscaled = attention[formats.training.layers[0].attention.name], bf16
        self._write(masters)
        self._optimiser = AdamW(dict(self._decoder.named_parameters()), training)

    @property
    def masters(self) -> dict[str, Tensor]:
        """FP32 weights by Hugging Face name: views of what is trained."""
        return named_masters(self._decoder)

    def describe(self) -> dict[str, object]:
        """Formats by layer, and what multiplies."""
        kernels = "hopper" if self._device.type == "cuda" else "exact"
        return {"trainer": "torch", "accumulation": kernels, **self._formats.training.describe()}

    def export(self) -> dict[str, Tensor]:
        """Weights for the rollout engine, quantised here and nowhere else, in one piece of memory: that lends fast."""
        self._decoder.forget()  # What passes multiply with would lie beside it.
        rollout = self._formats.rollout
        return in_one_buffer(stored_weights(self.masters, rollout.stored_names(), rollout.scale_rule))

    def digest(self) -> str:
        """Digest of the FP32 master weights."""
        return policy_digest(self.masters)

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales] | None) -> ScoredBatch:
        """As every trainer; raises GroupNotFinite when a linear met NaN or infinity, which kernels only note."""
        scored = super().logprobs(batch, temperature, scales)
        self._refuse_not_finite()
        return scored

    @torch.no_grad()
    def statistics(self, batch: TokenBatch) -> KvStatistics:
        """Statistics of Q, K and V per layer over all valid tokens, without any scales: attention in BF16."""
        self._inference_weights()
        statistics = self._no_statistics()
        for _, part in self._slices(batch):
            self._hidden(_Packed.of(part, self._device), self._unscaled, None, statistics)
        self._refuse_not_finite()
        return statistics

    def _hidden(
        self,
        packed: "_Packed",
        attention: PackedAttention,
        scales: Sequence[LayerScales] | None,
        statistics: KvStatistics | None,
    ) -> Tensor:
        observe: Observer | None = None
        if statistics is not None:
            valid = packed.pack.sequences.valid[None].to(self._device)

            def observe(layer: int, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
                q, k, v = (part.transpose(0, 1)[None] for part in qkv)
                statistics.observe(layer, (q, k, v), valid, scales[layer] if scales else None)

        hidden: Tensor = self._decoder(packed.tokens, packed.pack, attention, scales, observe)
        return hidden

    def _score(
        self,
        weights: Tensor,
        batch: TokenBatch,
        temperature: float,
        scales: Sequence[LayerScales] | None,
        statistics: KvStatistics | None = None,
    ) -> Scored:
        assert batch.experts is None, "experts are not packed"
        packed = _Packed.of(batch, self._device)
        with _deterministic(self._config.deterministic):
            hidden = self._hidden(packed, self._attention, scales, statistics)
            # Each written token is predicted by the position before it.
            options = HeadOptions(_HEADS[self._formats.training.head.name], temperature)
            logprobs, entropy = token_logprobs(
                hidden[packed.written - 1],
                self._decoder.head_master,
                weights,
                packed.tokens[packed.written],
                options,
            )
            return Scored(logprobs.cpu(), entropy.cpu())

    def _slices(self, batch: TokenBatch) -> Iterator[tuple[slice, TokenBatch]]:
        """As many rows as make no pack longer than `tokens_per_pass`, one at least."""
        lengths = [packed_length(length) for length in batch.valid.sum(-1).tolist()]
        start, total = 0, 0
        for row, length in enumerate([*lengths, self._config.tokens_per_pass]):
            if row > start and total + length > self._config.tokens_per_pass:
                rows = slice(start, row)
                yield rows, batch.part(rows, int(batch.valid[rows].sum(-1).max()))
                start, total = row, 0
            total += length

    def _no_statistics(self) -> KvStatistics:
        kind = AmaxStatistics if self._formats.amax_only else KvStatistics
        return kind(self.arch.num_layers, self._device)

    def _inference_weights(self) -> Tensor:
        self._decoder.hold()
        return self._decoder.head_master.detach().bfloat16()

    def _training_weights(self) -> Tensor:
        return self._inference_weights()

    def _backward(self, loss: Tensor, last: bool) -> None:
        with _deterministic(self._config.deterministic):
            torch.autograd.backward(loss)

    def _step(self, learning_rate: float) -> float:
        self._refuse_not_finite()
        gradients = [parameter.grad for parameter in self._decoder.parameters()]
        norm = float(torch.nn.utils.get_total_norm([grad for grad in gradients if grad is not None]))
        if math.isfinite(norm):
            self._decoder.forget()
            self._optimiser.step(learning_rate, min(1.0, self._config.max_grad_norm / (norm + 1e-6)))
        return norm

    def _drop_gradients(self) -> None:
        self._decoder.zero_grad(set_to_none=True)

    def _refuse_not_finite(self) -> None:
        try:
            self._flag.check()
        finally:
            self._flag.not_finite.zero_()

    def save(self, folder: Path) -> None:
        """Write FP32 masters, optimiser moments, counters; the folder exists."""
        save_file({name: tensor.cpu().clone() for name, tensor in self.masters.items()}, folder / _MASTERS)
        save_file({name: moment.cpu() for name, moment in self._optimiser.moments.items()}, folder / _OPTIMISER)
        state = {"version": self.version, "updates": self._updates, "digest": self.digest()}
        (folder / _STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the masters must be this model's."""
        state = json.loads((folder / _STATE).read_text())
        self._write(load_file(folder / _MASTERS))
        self.version, self._updates = state["version"], state["updates"]
        self._optimiser.load(load_file(folder / _OPTIMISER), self._updates)
        assert self.digest() == state["digest"], f"{folder} does not hold the weights it was saved with"

    def _write(self, masters: Mapping[str, Tensor]) -> None:
        own = self.masters
        assert own.keys() == masters.keys(), "masters of another model"
        for name, master in own.items():
            # Narrow weights become FP32 where they are going.
            master.copy_(masters[name].to(master.device))
        self._decoder.forget()


_HEADS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Packed:
    """Rows of a batch on the device: int64 tokens [tokens of the pack], and which of them the policy wrote."""

    tokens: Tensor
    written: Tensor
    pack: DevicePack

    @classmethod
    def of(cls, batch: TokenBatch, device: torch.device) -> "_Packed":
        sequences = PackedSequences.of(batch.valid.sum(-1).tolist())
        tokens = torch.zeros(sequences.tokens, dtype=torch.int64)
        tokens[sequences.valid] = batch.tokens[batch.valid]
        written = torch.zeros(sequences.tokens, dtype=torch.bool)
        written[sequences.valid] = batch.completion[batch.valid]
        return cls(tokens.to(device), written.nonzero().squeeze(-1).to(device), DevicePack.of(sequences, device))


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Only kernels whose result is the same every time, inside; torch knows one switch for the whole process."""
    before, settings = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted or before)
    # Filling what is about to be overwritten costs a pass over memory and changes no result.
    settings.fill_uninitialized_memory = filled and not wanted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
