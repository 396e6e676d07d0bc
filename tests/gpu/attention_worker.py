"""A worker that keeps what attention reads and writes; vLLM imports it by name in its own process."""

from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp8core.rollout.vllm.internals import VllmPolicy
from fp8core.rollout.vllm.worker import PolicyWorker


class AttentionPolicy(VllmPolicy):
    """Keeps Q, K, V and the output of every layer, of the first step that is not replayed from a graph."""

    def watch(self) -> None:
        """Keep from now on."""
        self._hooks, self._seen = list[Any](), dict[str, Tensor]()
        for name, module in self._model.named_modules():
            if name.endswith(".self_attn.attn"):
                self._hooks.append(module.register_forward_hook(self._keeper(name.split(".")[2])))

    def watched(self, path: str) -> None:
        """Save what was kept, [tokens, values] each, and the rotary tables; of several GPUs the first has it.

        Nothing is kept any more.
        """
        for hook in self._hooks:
            hook.remove()
        if self._rank() == 0:
            seen = self._seen | {"cosines": self._model.cosines, "sines": self._model.sines}
            save_file({name: tensor.contiguous().cpu() for name, tensor in seen.items()}, path)
        self._hooks, self._seen = [], {}

    def _keeper(self, layer: str) -> Any:
        def keep(module: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
            for name, tensor in zip(("q", "k", "v", "attended"), (*inputs, output), strict=True):
                self._seen.setdefault(f"{layer}.{name}", tensor.detach().clone())

        return keep


class AttentionWorker(PolicyWorker):
    policy_class = AttentionPolicy
