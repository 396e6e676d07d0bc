"""A worker that keeps what attention reads and writes; vLLM imports it by name in its own process."""

from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fp8core.rollout.vllm.internals import layer_share
from fp8core.rollout.vllm.worker import PolicyWorker


class AttentionWorker(PolicyWorker):
    """Keeps Q, K, V and the output of every layer, of the first step that is not replayed from a graph."""

    policy_hooks: list[Any]
    policy_kept: dict[str, Tensor]

    def policy_watch(self) -> None:
        """Keep from now on."""
        self.policy_hooks, self.policy_kept = [], {}
        for name, module in self._policy_model().named_modules():
            if name.endswith(".self_attn.attn"):
                layer = name.split(".")[2]
                self.policy_hooks.append(module.register_forward_hook(self._policy_keeper(layer)))

    @torch.inference_mode()
    def policy_watched(self, path: str) -> None:
        """Save what was kept, [tokens, values] each, and the rotary tables; of several GPUs the first has it.

        Nothing is kept any more.
        """
        for hook in self.policy_hooks:
            hook.remove()
        if layer_share()[0] == 0:
            model = self._policy_model()
            kept = self.policy_kept | {"cosines": model.cosines, "sines": model.sines}
            save_file({name: tensor.contiguous().cpu() for name, tensor in kept.items()}, path)
        self.policy_hooks, self.policy_kept = [], {}

    def _policy_keeper(self, layer: str) -> Any:
        def keep(module: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
            for name, tensor in zip(("q", "k", "v", "attended"), (*inputs, output), strict=True):
                self.policy_kept.setdefault(f"{layer}.{name}", tensor.detach().clone())

        return keep
