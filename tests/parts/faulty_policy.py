"""A policy that can be told to do its work wrong, in the process of vLLM or SGLang."""

from typing import Any

import torch

from fp8core.rollout.shared_weights import SharedWeights
from fp8core.rollout.worker_policy import WorkerPolicy


class FaultyPolicy(WorkerPolicy):
    """Commits `fault` on every write; none at first. `experts`: the module with the experts of layer 0."""

    fault = ""
    experts: str

    def commit_fault(self, fault: str, rank: int = 0) -> None:
        """The fault of the writes from now on, of one of those that share the layers; an empty name for none."""
        self.fault = fault if self._rank() == rank else ""

    def write(self, received: SharedWeights) -> None:
        """Write, then damage what a sender, a copy or a kernel could have damaged."""
        before = {name: tensor.detach().clone() for name, tensor in self._parameters_by_name().items()}
        super().write(received)
        damage = getattr(self, f"_{self.fault}", None)
        if damage is not None:
            damage({name: tensor.data for name, tensor in self._parameters_by_name().items()}, before)

    def end(self, version: int) -> None:
        """Say another one."""
        super().end(version - 1 if self.fault == "wrong_version" else version)

    def set_scales(self, scales: Any) -> None:
        """Set them, but not as they were sent."""
        sent = [list(layer) for layer in scales]
        if self.fault == "wrong_scale":
            sent[1][1] *= 2
        if self.fault == "unwritten_scale":
            sent[1][1] = torch.nan
        super().set_scales(sent)

    def rewritten_scales(self, scales: list[list[float]]) -> list[list[float]]:
        """Set scales and read them back, whatever the format of the cache."""
        before = self._read_scales()
        self._write_scales(scales)
        held = self._read_scales()
        self._write_scales(before)
        return held

    def addresses(self) -> dict[str, int]:
        """Where every parameter lies."""
        return {name: tensor.data_ptr() for name, tensor in self._parameters_by_name().items()}

    def _skipped_tensor(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        name = "model.layers.1.self_attn.q_norm.weight"
        now[name].copy_(before[name])

    def _stale_layer(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        for name in now:
            if name.startswith("model.layers.1."):
                now[name].copy_(before[name])

    def _swapped_tiles(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        weight = now["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
        left, right = weight[:64, :64].clone(), weight[:64, 64:128].clone()
        weight[:64, :64], weight[:64, 64:128] = right, left

    def _swapped_parts(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        weight = now["model.layers.0.mlp.gate_up_proj.weight"].view(torch.uint8)
        weight.copy_(torch.cat(weight.chunk(2)[::-1]).clone())

    def _swapped_experts(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        for part in ("w13", "w2"):
            weight = now[f"{self.experts}.{part}_weight"].view(torch.uint8)
            weight[:2] = weight[:2].flip(0)

    def _doubled_tile(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        now[f"{self.experts}.w2_weight_scale_inv"][5, 1, 0] *= 2

    def _flipped_bit(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        now["lm_head.weight"].view(torch.int16)[3, 5] ^= 1
