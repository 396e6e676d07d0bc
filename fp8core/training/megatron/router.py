"""Megatron's top-k router with the choice of experts that the rollout made (router replay), on any device."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8core.models.experts import UNRECORDED, top_k
from fp8core.numerics.rounding import Rounding, keep_fp32


class Replay:
    """Stands in the place of Megatron's `RouterReplay`, which cannot leave a position to the router.

    The router's own choice is the reference's: of equal scores the lower index, where torch's topk takes any. Scores in
    BF16 are often equal.

    `chosen` is int16 [T, k], `UNRECORDED` where the router chooses by itself, or None without a replay. It stays for
    the recomputation of a backward pass.
    """

    def __init__(self) -> None:
        self.chosen: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [T, k] of the experts: Megatron's call, by Megatron's name."""
        indices = top_k(scores, topk)
        if self.chosen is not None:
            indices = torch.where(self.chosen == UNRECORDED, indices, self.chosen.long())
        return scores.gather(1, indices), indices


class PolicyRouter(TopKRouter):
    """A router that runs anywhere: Megatron's moves its weight to a GPU and needs Transformer Engine to multiply.

    `rounding` is the contract's point `routed`, which `Policy` sets: Megatron builds this class from its own arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = Replay()
        self.rounding: Rounding = keep_fp32

    def gating(self, hidden: Tensor) -> Tensor:
        """Logits [..., experts] in FP32 from BF16 or FP32 operands."""
        return self.rounding(torch.nn.functional.linear(hidden.float(), self.weight.float()))
