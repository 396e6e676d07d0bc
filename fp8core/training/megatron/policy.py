"""One process's share of a policy in Megatron's layers: loads weights, scores sequences, gives weights back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import all_reduce

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.models.router_losses import RouterLosses
from fp8core.models.weights import training_formats
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.numerics.logprobs import chunked_logprobs
from fp8core.numerics.packed import copy_to
from fp8core.training.megatron import conversion
from fp8core.training.megatron.arguments import transformer_arguments
from fp8core.training.megatron.model import PolicyModel, PolicyRouter, ShardedHead, VocabularyShare
from fp8core.training.megatron.parallel import data_group, own_rank, tensor_group
from fp8core.training.packing import Pack


@dataclass(frozen=True)
class CountedPack:
    """Where a pack does not `count`, another process counts it: this one takes part for the collectives."""

    pack: Pack
    counts: bool

    @property
    def valid(self) -> Tensor:
        """bool [1, T]: tokens that count."""
        return self.pack.sequences.valid[None].to(self.pack.tokens.device) & self.counts

    def to(self, device: torch.device) -> "CountedPack":
        return CountedPack(self.pack.to(device), self.counts)


class MegatronPolicy:
    """The model of this process; process groups exist (`parallel.join`)."""

    style = conversion.TRANSFORMER_ENGINE

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        megatron: MegatronConfig,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        config = TransformerConfig(**transformer_arguments(arch, contract, megatron, deterministic))
        self.arch = arch
        self.device = device
        self.megatron = megatron
        self.rank = own_rank()
        self.model = PolicyModel(arch, megatron, config, device).to(device)
        self.routers = [module for module in self.model.modules() if isinstance(module, PolicyRouter)]
        routing = training_formats(contract, arch.num_layers).points.routed
        for router in self.routers:
            router.rounding = routing
        self._observing = False
        self._valid = torch.empty(0)
        rows = conversion.padded_vocabulary(arch, megatron.tensor_parallel) // megatron.tensor_parallel
        self._head = VocabularyShare(rows * self.rank.tensor, arch.vocab_size, tensor_group(), contract.training.head)

    def describe(self) -> dict[str, object]:
        config = self.model.config
        inner = "fp8_block" if config.fp8 else "bf16"
        ends = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16)
        first, last = ends if config.first_last_layers_bf16 else (0, 0)
        bf16_layers = {*range(first), *range(config.num_layers - last, config.num_layers)}
        return {
            "linear": ["bf16" if layer in bf16_layers else inner for layer in range(config.num_layers)],
            "attention": "bf16",
            "head": self._head.form,
            "layers": config.transformer_impl,
            # The order in which tokens of an expert are added up has not been shown to be fixed.
            "deterministic": bool(config.deterministic_mode) and not self.arch.sparse_layers,
            "grid": vars(self.megatron),
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's share of a whole policy in the Hugging Face layout."""
        own = dict(self.model.named_parameters())
        own_share = conversion.share(self.arch, self.megatron, self.style, self.rank, weights)
        assert own.keys() == own_share.keys(), (
            f"Megatron names other parameters: {sorted(own.keys() ^ own_share.keys())}"
        )
        for name, parameter in own.items():
            assert parameter.shape == own_share[name].shape, f"{name}: {parameter.shape} is not {own_share[name].shape}"
            parameter.data.copy_(own_share[name])

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def whole(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole policy in the Hugging Face layout from every process's tensors.

        Where processes share it, the first one has it on the CPU, and the others have nothing."""
        if len(conversion.parallel_ranks(self.megatron)) == 1:
            return conversion.policy_of(self.arch, self.megatron, self.style, {self.rank: shares})
        whole = conversion.gather_policy(self.rank, shares, self.device)
        return conversion.policy_of(self.arch, self.megatron, self.style, whole) if whole else {}

    def sharded(self) -> ShardedStateDict:
        metadata = {"dp_cp_group": data_group(), "non_homogeneous_layers": True, "singleton_local_shards": True}
        state = self.model.sharded_state_dict(metadata=metadata)
        return {name: state[name] for name, _ in self.model.named_parameters()}

    def hidden(self, micro_batch: CountedPack, losses: RouterLosses | None = None) -> Tensor:
        """[T, 1, hidden] after the final norm, differentiable; its backward comes before the next call."""
        if self._observing:
            self._valid = micro_batch.valid
        pack = micro_batch.pack
        self._replay(pack.experts)
        self._place(pack, losses)
        longest = pack.sequences.longest
        bounds = copy_to(torch.tensor(pack.sequences.starts, dtype=torch.int32), self.device)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        positions = copy_to(pack.sequences.positions, self.device)
        states: Tensor = self.model(
            input_ids=pack.tokens[None], position_ids=positions[None], attention_mask=None, packed_seq_params=params
        )
        return states

    def head(self, micro_batch: CountedPack, states: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each written token, FP32 [targets], differentiable."""
        pack = micro_batch.pack
        target_states = states[:, 0][pack.target_positions - 1]
        weight = self.model.head_weight()
        targets = pack.tokens[pack.target_positions]
        return chunked_logprobs(target_states, weight, ShardedHead(weight, self._head, temperature), targets)

    def _replay(self, experts: Tensor | None) -> None:
        """Force a pack's experts [T, sparse layers, k] on the routers, or leave them to choose."""
        for index, router in enumerate(self.routers):
            if experts is None:
                router.router_replay.chosen = None
                continue
            router.router_replay.chosen = self._routed(experts[:, index])

    def _place(self, pack: Pack, losses: RouterLosses | None) -> None:
        """Give the routers the losses of a pack."""
        for router in self.routers:
            router.losses = losses
        if losses is not None and self.routers:
            owners = torch.where(pack.sequences.valid, pack.sequences.owners, -1)
            losses.place(copy_to(self._routed(owners), self.device), self._summed)

    def _routed(self, values: Tensor) -> Tensor:
        """Of [T, ...] those of the tokens that this process's routers see."""
        if not self.megatron.sequence_parallel:
            return values
        return values.chunk(self.megatron.tensor_parallel)[self.rank.tensor]

    def _summed(self, own: Tensor) -> Tensor:
        if self.megatron.sequence_parallel:
            all_reduce(own, group=tensor_group())
        return own

    @contextmanager
    def observed(self, statistics: KvStatistics, scales: Scales) -> Iterator[None]:
        """While it lasts, Q, K and V are added to the statistics; for passes without gradients."""
        self._observing = True

        def observe(layer: int, _: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            assert not torch.is_grad_enabled(), "a pass with gradients may run twice"
            q, k, v = (x.detach().transpose(0, 1)[None] for x in arguments[:3])
            statistics.observe(layer, (q, k, v), self._valid, scales[layer] if scales else None)

        handles = [
            layer.self_attention.core_attention.register_forward_pre_hook(partial(observe, layer.layer_number - 1))
            for layer in self.model.decoder.layers
        ]
        try:
            yield
        finally:
            self._observing = False
            for handle in handles:
                handle.remove()
