"""A worker that can be told to do its work wrong; vLLM imports it by name in its own process."""

from typing import Any

import torch

from fp8core.rollout.shared_weights import SharedWeights
from fp8core.rollout.vllm import internals
from fp8core.rollout.vllm.worker import CapturingWorker


class FaultyWorker(CapturingWorker):
    """Commits `policy_fault` on every write; none at first."""

    policy_fault = ""

    def policy_commit_fault(self, fault: str, share: int = 0) -> None:
        """The fault of the writes from now on, of one of those that share the layers; an empty name for none."""
        self.policy_fault = fault if internals.layer_share()[0] == share else ""

    def policy_write(self, received: SharedWeights) -> list[str]:
        """Write, then damage what a sender, a copy or a kernel could have damaged."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        written = super().policy_write(received)
        damage = getattr(self, f"_policy_{self.policy_fault}", None)
        if damage is not None:
            with torch.inference_mode():
                damage({name: tensor.data for name, tensor in parameters.items()}, before)
        return written

    def policy_end(self, version: int) -> None:
        """Say another one."""
        super().policy_end(version - 1 if self.policy_fault == "wrong_version" else version)

    def policy_set_scales(self, scales: list[list[float]]) -> None:
        """Set them, but not as they were sent."""
        sent = [list(layer) for layer in scales]
        if self.policy_fault == "wrong_scale":
            sent[1][1] *= 2
        if self.policy_fault == "unwritten_scale":
            sent[1][1] = torch.nan
        super().policy_set_scales(sent)

    @torch.inference_mode()
    def policy_scales(self, scales: list[list[float]]) -> list[list[float]]:
        """Set scales and read them back, whatever the format of the cache."""
        model = self.model_runner.get_model()
        before = internals.read_scales(model)
        internals.write_scales(model, scales)
        held = internals.read_scales(model)
        internals.write_scales(model, before)
        return held

    def policy_addresses(self) -> dict[str, int]:
        """Where every parameter lies."""
        return {name: tensor.data_ptr() for name, tensor in self.model_runner.get_model().named_parameters()}

    def _policy_skipped_tensor(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        name = "model.layers.1.self_attn.q_norm.weight"
        now[name].copy_(before[name])

    def _policy_stale_layer(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        for name in now:
            if name.startswith("model.layers.1."):
                now[name].copy_(before[name])

    def _policy_swapped_tiles(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        weight = now["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
        left, right = weight[:64, :64].clone(), weight[:64, 64:128].clone()
        weight[:64, :64], weight[:64, 64:128] = right, left

    def _policy_swapped_parts(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        weight = now["model.layers.0.mlp.gate_up_proj.weight"]
        weight.copy_(torch.cat(weight.chunk(2)[::-1]).clone())

    def _policy_swapped_experts(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        for part in ("w13", "w2"):
            weight = now[f"model.layers.0.mlp.experts.routed_experts.{part}_weight"].view(torch.uint8)
            weight[:2] = weight[:2].flip(0)

    def _policy_doubled_tile(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        now["model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv"][5, 1, 0] *= 2

    def _policy_flipped_bit(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        now["lm_head.weight"].view(torch.int16)[3, 5] ^= 1
