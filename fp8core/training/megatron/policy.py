"""One process's share of a policy in Megatron's layers: loads weights, scores sequences, gives weights back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8core.config.megatron import MegatronConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.models.formats import training_formats
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.training.megatron.arguments import Kind, transformer_arguments
from fp8core.training.megatron.conversion import policy_of, share
from fp8core.training.megatron.gather import gathered
from fp8core.training.megatron.grid import padded_vocabulary
from fp8core.training.megatron.groups import data_group, here, tensor_group
from fp8core.training.megatron.head import VocabularyShare, written_logprobs
from fp8core.training.megatron.layer_spec import style_of
from fp8core.training.megatron.model import PolicyModel, packed_call
from fp8core.training.megatron.names import layers_of, places
from fp8core.training.megatron.observer import Observer
from fp8core.training.megatron.packing import Pass
from fp8core.training.megatron.router import PolicyRouter


class Policy:
    """The model of this process; process groups exist (`groups.join`)."""

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
        self.style, self.place = style_of(config), here()
        self._megatron = megatron
        first, last = self.place.pipeline == 0, self.place.pipeline == megatron.pipeline_parallel - 1
        self.model = PolicyModel(arch, megatron, config, device, first, last).to(device)
        self.routers = [module for module in self.model.modules() if isinstance(module, PolicyRouter)]
        routed = training_formats(contract, arch.num_layers).points.routed
        for router in self.routers:
            router.rounding = routed
        self._observer: Observer | None = None
        rows = padded_vocabulary(arch, megatron.tensor_parallel) // megatron.tensor_parallel
        self._head = VocabularyShare(rows * self.place.tensor, arch.vocab_size, tensor_group(), contract.training.head)

    def describe(self) -> dict[str, object]:
        """Formats by layer as they were built, and whose layers these are."""
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
            "grid": vars(self._megatron),
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take this place's share of a whole policy in the Hugging Face layout; the share of every parameter."""
        held = dict(self.model.named_parameters())
        found = share(self.arch, self._megatron, self.style, self.place, weights)
        assert held.keys() == found.keys(), f"Megatron names other parameters: {sorted(held.keys() ^ found.keys())}"
        for name, parameter in held.items():
            assert parameter.shape == found[name].shape, f"{name}: {parameter.shape} is not {found[name].shape}"
            parameter.data.copy_(found[name])

    def parameters(self) -> dict[str, Tensor]:
        """What this process multiplies with, by Megatron's names."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def whole(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every process's tensors by Megatron's names, put together in the Hugging Face layout.

        Where each process holds all of them, every one has the result on its device; else the first one has it on the
        CPU, and the others nothing.
        """
        if len(places(self._megatron)) == 1:
            return policy_of(self.arch, self._megatron, self.style, {self.place: shares})
        found = gathered(self.place, shares, self.device)
        return policy_of(self.arch, self._megatron, self.style, found) if found else {}

    def begin(self, training: bool) -> None:
        """Start passes with gradients, or without: only those with gradients recompute."""
        self.model.train(training)

    def sharded(self) -> ShardedStateDict:
        """Parameters as Megatron's checkpoints describe them, by this process's names."""
        metadata = {"dp_cp_group": data_group(), "non_homogeneous_layers": True, "singleton_local_shards": True}
        found = self.model.sharded_state_dict(metadata=metadata)
        return {name: found[name] for name, _ in self.model.named_parameters()}

    def hidden(self, turn: Pass) -> Tensor:
        """[T, 1, hidden] (differentiable) that this stage hands on; of the last stage what the head takes.

        Args:
            turn: on this device. What an earlier stage made of it is the model's input already (`set_input_tensor`).
        """
        if self._observer is not None:
            self._observer.valid = turn.valid
        self._replay(turn.pack.experts)
        states: Tensor = self.model(**packed_call(turn.pack))
        if self.routers and states.requires_grad:
            # A stage goes on to other passes before it goes back through this one, which may compute it again.
            states.register_hook(lambda _: self._replay(turn.pack.experts))
        return states

    def head(self, turn: Pass, states: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob (differentiable) and entropy of each written token, FP32 [written], of the last stage's states."""
        pack = turn.pack
        chosen = states[:, 0][pack.before]
        return written_logprobs(chosen, self.model.head_weight(), self._head, pack.written, temperature)

    def _replay(self, experts: Tensor | None) -> None:
        """Force a pack's experts [T, sparse layers of all stages, k] on the routers, or leave them to choose."""
        stage = layers_of(self.arch, self._megatron, self.place.pipeline)
        sparse = [index for index, layer in enumerate(self.arch.sparse_layers) if layer in stage]
        for index, router in zip(sparse, self.routers, strict=True):
            if experts is None:
                router.router_replay.chosen = None
                continue
            chosen = experts[:, index]
            if self._megatron.sequence_parallel:
                chosen = chosen.chunk(self._megatron.tensor_parallel)[self.place.tensor]
            router.router_replay.chosen = chosen

    @contextmanager
    def observed(self, statistics: KvStatistics, scales: Sequence[LayerScales] | None) -> Iterator[None]:
        """While it lasts, Q, K and V of this stage's attention are added to the statistics as they would be cached.

        For passes without gradients: a pass with recomputation would count twice.
        """
        self._observer = observer = Observer(statistics, scales)
        handles = [
            layer.self_attention.core_attention.register_forward_pre_hook(observer.hook(layer.layer_number - 1))
            for layer in self.model.decoder.layers
        ]
        try:
            yield
        finally:
            self._observer = None
            for handle in handles:
                handle.remove()
