"""The part inside vLLM's worker process: the policy that it holds; vLLM mixes `PolicyWorker` into its worker."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8core.processes import end_with_parent
from fp8core.rollout.held_policy import HeldPolicy
from fp8core.rollout.vllm import internals

# This module is imported in the worker's process before it builds the model, and before it takes memory of a GPU.
end_with_parent.follow_parent()
internals.register_decode_backend()
internals.register_aligned_models()


class VllmPolicy(HeldPolicy):
    def __init__(self, worker: "PolicyWorker") -> None:
        super().__init__(worker.model_runner.get_model(), worker.device)
        self._worker = worker

    def follow(self, pid: int) -> None:
        end_with_parent.follow(pid)

    def set_temperature(self, temperature: float) -> None:
        """Set what an aligned model divides its logits by, above 0."""
        self._model.temperature = temperature

    def describe(self) -> dict[str, Any]:
        model, config = self._model, self._worker.vllm_config
        compilation = config.compilation_config
        passes = {k: v for k, v in vars(compilation.pass_config).items() if isinstance(v, bool)}
        return {
            "model": type(model).__name__,
            "linears": internals.describe_linears(model),
            "attention": internals.describe_attention(model),
            "head": internals.head_dtype(model),
            "activations": internals.activation_rule(model),
            "passes": passes,
            "custom_ops": list(compilation.custom_ops),
            "norms": internals.norm_providers(config),
            "compilation": compilation.mode.name,
            "graphs": str(compilation.cudagraph_mode),
            "runner": type(self._worker.model_runner).__module__,
        }

    def _has_scales(self) -> bool:
        return str(self._worker.vllm_config.cache_config.cache_dtype).startswith("fp8")

    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        internals.write_scales(self._model, scales)

    def _read_scales(self) -> list[list[float]]:
        return internals.read_scales(self._model)

    def _caches(self) -> Iterable[Tensor]:
        return internals.cache_tensors(self._worker.model_runner)

    def _rank(self) -> int:
        return internals.layer_share()[0]

    def _gather(self, part: Tensor, axis: int) -> Tensor:
        return internals.gather(part, axis)


class PolicyWorker:
    """Our part of vLLM's worker; `policy_` keeps it apart from vLLM's own."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    policy_class: type[VllmPolicy] = VllmPolicy
    policy_held: VllmPolicy | None = None

    def policy_answer(self, method: str, *arguments: Any) -> Any:
        if self.policy_held is None:
            self.policy_held = self.policy_class(self)
        return self.policy_held.answer(method, *arguments)
