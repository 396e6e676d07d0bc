"""One process's share of a policy in Megatron's layers: loads weights, scores sequences, gives weights back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.config.training import MegatronConfig
from fp8core.models.architecture import Architecture
from fp8core.models.weights import training_formats
from fp8core.numerics.kv_scales import KvStatistics, Scales
from fp8core.training.megatron.arguments import Kind, transformer_arguments
from fp8core.training.megatron.conversion import (
    LOCAL,
    TRANSFORMER_ENGINE,
    gathered,
    layers_of,
    padded_vocabulary,
    parallel_ranks,
    policy_of,
    share,
)
from fp8core.training.megatron.model import PolicyModel, PolicyRouter, VocabularyShare, packed_call, written_logprobs
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

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        megatron: MegatronConfig,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        kind: Kind = "cuda" if device.type == "cuda" else "cpu"
        config = TransformerConfig(**transformer_arguments(arch, contract, megatron, kind, deterministic))
        self.arch, self.device = arch, device
        self.style, self.rank = TRANSFORMER_ENGINE if kind == "cuda" else LOCAL, own_rank()
        self.megatron = megatron
        first, last = self.rank.pipeline == 0, self.rank.pipeline == megatron.pipeline_parallel - 1
        self.model = PolicyModel(arch, megatron, config, device, first, last).to(device)
        self.routers = [module for module in self.model.modules() if isinstance(module, PolicyRouter)]
        routed = training_formats(contract, arch.num_layers).points.routed
        for router in self.routers:
            router.rounding = routed
        self._observing, self._valid = False, torch.empty(0)
        rows = padded_vocabulary(arch, megatron.tensor_parallel) // megatron.tensor_parallel
        self._head = VocabularyShare(rows * self.rank.tensor, arch.vocab_size, tensor_group(), contract.training.head)

    def describe(self) -> dict[str, object]:
        config = self.model.config
        inner = "fp8_block" if config.fp8 else "fp32" if config.params_dtype == torch.float32 else "bf16"
        ends = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16)
        first, last = ends if config.first_last_layers_bf16 else (0, 0)
        kept = {*range(first), *range(config.num_layers - last, config.num_layers)}
        return {
            "linear": ["bf16" if layer in kept else inner for layer in range(config.num_layers)],
            "attention": "fp32" if inner == "fp32" else "bf16",
            "head": self._head.form,
            "layers": config.transformer_impl,
            # The order in which tokens of an expert are added up has not been shown to be fixed.
            "deterministic": bool(config.deterministic_mode) and not self.arch.sparse_layers,
            "grid": vars(self.megatron),
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's share of a whole policy in the Hugging Face layout."""
        held = dict(self.model.named_parameters())
        found = share(self.arch, self.megatron, self.style, self.rank, weights)
        assert held.keys() == found.keys(), f"Megatron names other parameters: {sorted(held.keys() ^ found.keys())}"
        for name, parameter in held.items():
            assert parameter.shape == found[name].shape, f"{name}: {parameter.shape} is not {found[name].shape}"
            parameter.data.copy_(found[name])

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def whole(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole policy in the Hugging Face layout from every process's tensors.

        Where processes share it, the first one has it on the CPU, and the others have nothing."""
        if len(parallel_ranks(self.megatron)) == 1:
            return policy_of(self.arch, self.megatron, self.style, {self.rank: shares})
        found = gathered(self.rank, shares, self.device)
        return policy_of(self.arch, self.megatron, self.style, found) if found else {}

    def sharded(self) -> ShardedStateDict:
        metadata = {"dp_cp_group": data_group(), "non_homogeneous_layers": True, "singleton_local_shards": True}
        found = self.model.sharded_state_dict(metadata=metadata)
        return {name: found[name] for name, _ in self.model.named_parameters()}

    def hidden(self, micro_batch: CountedPack) -> Tensor:
        """[T, 1, hidden] (differentiable) that this stage hands on; of the last stage what the head takes."""
        if self._observing:
            self._valid = micro_batch.valid
        self._replay(micro_batch.pack.experts)
        states: Tensor = self.model(**packed_call(micro_batch.pack))
        if self.routers and states.requires_grad:
            # Other micro-batches run before the backward pass of this one, which may recompute it.
            states.register_hook(lambda _: self._replay(micro_batch.pack.experts))
        return states

    def head(self, micro_batch: CountedPack, states: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each written token, FP32 [written], differentiable."""
        pack = micro_batch.pack
        chosen = states[:, 0][pack.written - 1]
        targets = pack.tokens[pack.written]
        return written_logprobs(chosen, self.model.head_weight(), self._head, targets, temperature)

    def _replay(self, experts: Tensor | None) -> None:
        """Force a pack's experts [T, sparse layers of all stages, k] on the routers, or leave them to choose."""
        stage = layers_of(self.arch, self.megatron, self.rank.pipeline)
        sparse = [index for index, layer in enumerate(self.arch.sparse_layers) if layer in stage]
        for index, router in zip(sparse, self.routers, strict=True):
            if experts is None:
                router.router_replay.chosen = None
                continue
            chosen = experts[:, index]
            if self.megatron.sequence_parallel:
                chosen = chosen.chunk(self.megatron.tensor_parallel)[self.rank.tensor]
            router.router_replay.chosen = chosen

    @contextmanager
    def observed(self, statistics: KvStatistics, scales: Scales) -> Iterator[None]:
        """While it lasts, Q, K and V of this stage are added to the statistics; for passes without gradients."""
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


TakeScores = Callable[[CountedPack, Tensor, Tensor], None]
"""Takes a micro-batch on the policy's device, and log-prob and entropy of each written token, FP32 [written]."""
Loss = Callable[[CountedPack, Tensor, Tensor], Tensor]
"""From a micro-batch, its log-probs and its entropies, both differentiable, to its share of the loss: a scalar."""


def score(policy: MegatronPolicy, micro_batches: Sequence[CountedPack], temperature: float, scored: TakeScores) -> None:
    """Forward passes under the caller's `no_grad`; `scored` is called in the last stage alone."""

    def finish(micro_batch: CountedPack, states: Tensor) -> Tensor:
        scored(micro_batch, *policy.head(micro_batch, states, temperature))
        return states

    policy.model.train(False)
    _run(policy, micro_batches, finish, forward_only=True)


def accumulate(policy: MegatronPolicy, micro_batches: Sequence[CountedPack], temperature: float, loss: Loss) -> None:
    """Add up the gradients of all micro-batches; `loss` is called in the last stage alone."""

    def finish(micro_batch: CountedPack, states: Tensor) -> Tensor:
        return loss(micro_batch, *policy.head(micro_batch, states, temperature))

    # Only passes with gradients recompute.
    policy.model.train(True)
    _run(policy, micro_batches, finish, forward_only=False)


def _run(
    policy: MegatronPolicy,
    micro_batches: Sequence[CountedPack],
    finish: Callable[[CountedPack, Tensor], Tensor],
    forward_only: bool,
) -> None:
    """One micro-batch after another, or through Megatron's own pipeline schedule without virtual stages (1F1B).

    All stages hold the whole batch, so that they agree on the packs. The head and the loss are the last stage's."""
    on_device = (micro_batch.to(policy.device) for micro_batch in micro_batches)
    if policy.megatron.pipeline_parallel == 1:
        for micro_batch in on_device:
            result = finish(micro_batch, policy.hidden(micro_batch))
            if not forward_only:
                result.backward()
        return

    def last(micro_batch: CountedPack, states: Tensor) -> tuple[Tensor, Tensor, None]:
        # The schedule divides a loss by the number of micro-batches unless it gets tokens, which it only adds up.
        return finish(micro_batch, states), torch.tensor(len(micro_batch.pack.written), dtype=torch.int), None

    def forward(remaining: Iterator[CountedPack], _: PolicyModel) -> tuple[Tensor, Callable[[Tensor], object]]:
        micro_batch = next(remaining)
        return policy.hidden(micro_batch), partial(last, micro_batch)

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=on_device,
        model=policy.model,
        num_microbatches=len(micro_batches),
        # For the schedule a pack is one sequence, whose length the stages exchange.
        seq_length=len(micro_batches[0].pack.tokens),
        micro_batch_size=1,
        forward_only=forward_only,
    )
