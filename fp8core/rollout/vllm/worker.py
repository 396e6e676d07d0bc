"""The part inside vLLM's worker process; vLLM mixes `PolicyWorker` into its worker."""

from typing import Any

import torch

from fp8core.processes import end_with_parent
from fp8core.rollout.vllm.internals import VllmPolicy, register_aligned_models, register_decode_backend

# This module is imported in the worker's process before it builds the model, and before it takes memory of a GPU.
end_with_parent.follow_parent()
register_decode_backend()
register_aligned_models()


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
