"""Rewards and groups before advantages: overlong penalties, scaling, and which groups carry a signal (DAPO).

`rewards`, `lengths` and `groups` are [N], one per completion; results have the dtype of `rewards` unless said.
"""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment, FP64 [N], to add to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to -`penalty` at `max_length`, and no further.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 1 and max_length={max_length}")
    return -penalty * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


def scale_rewards(rewards: Tensor, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Rewards clamped to `source` and mapped linearly onto `target` (NeMo RL `grpo.reward_scaling`)."""
    low, high = source
    if not low < high:
        raise ValueError(f"source range {source} is empty")
    share = (rewards.double().clamp(low, high) - low) / (high - low)
    return (target[0] + share * (target[1] - target[0])).to(rewards.dtype)


def without_overlong(mask: Tensor, truncated: Tensor) -> Tensor:
    """Overlong filtering: `mask` bool [N, T] with the rows of `truncated` (bool [N]) emptied (DAPO, section 3.4).

    The rows leave the loss; whether they leave the baseline is the choice of `keep` in the advantages.
    """
    return mask & ~truncated[:, None]


def informative(rewards: Tensor, groups: Tensor, keep: Tensor | None = None) -> Tensor:
    """Bool [N]: rows of groups whose kept rewards are not all equal (dynamic sampling, arXiv 2503.14476, eq. 11)."""
    kept = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    index = torch.unique(groups, return_inverse=True)[1]

    def extreme(empty: float, reduce: str) -> Tensor:
        start = torch.full_like(rewards, empty)
        return start.scatter_reduce(0, index, torch.where(kept, rewards, empty), reduce)[index]

    return extreme(torch.inf, "amin") < extreme(-torch.inf, "amax")
