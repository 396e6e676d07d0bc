"""Advantages from one reward per completion: N rewards, each in the group of its prompt.

Rows outside `baseline_mask` are in no mean and no standard deviation, and get 0. Equal rewards give exactly 0. A row
alone in it gets 0 (verl gives it the raw reward). Standard deviations are a sample's, as in TRL, verl, SkyRL, slime.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rewards in the groups of their prompts; each row holds the statistics of its group, [N].

    Attributes:
        baseline_mask: bool, rows that make the baseline of their group.
        count: rows of the group in the baseline, FP64.
        centred: rewards minus the mean of the baseline, FP64; 0 of rows outside it.
    """

    index: Tensor
    baseline_mask: Tensor
    count: Tensor
    centred: Tensor

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor, baseline_mask: Tensor) -> "Groups":
        """From FP64 rewards, integer labels of groups and bool `baseline_mask`, each [N]."""
        assert baseline_mask.dtype == torch.bool, f"baseline_mask is {baseline_mask.dtype}, not bool"
        assert rewards.shape == groups.shape == baseline_mask.shape == (len(rewards),), (
            "rewards, groups and mask are [N]"
        )
        index = torch.unique(groups, return_inverse=True)[1]
        # Relative to the group's smallest reward, equal rewards are exact zeros, and so are their mean and spread.
        infinity = torch.full_like(rewards, torch.inf, dtype=torch.float64)
        lowest = infinity.scatter_reduce(0, index, torch.where(baseline_mask, rewards.double(), torch.inf), "amin")
        shifted_rewards = torch.where(baseline_mask, rewards.double() - lowest[index], 0.0)
        count = _group_sum(baseline_mask.double(), index)
        mean = _group_sum(shifted_rewards, index) / count.clamp_min(1)
        return cls(index, baseline_mask, count, torch.where(baseline_mask, shifted_rewards - mean, 0.0))

    @property
    def minus_others(self) -> Tensor:
        """r - mean of the others, which is (r - mean) n / (n - 1)."""
        return self.centred * self.count / (self.count - 1).clamp_min(1)

    def sum(self, values: Tensor) -> Tensor:
        return _group_sum(torch.where(self.baseline_mask, values, 0.0), self.index)

    def advantages(self, values: Tensor) -> Tensor:
        """`values`, but 0 for rows at their group's mean: rejected, alone, or of equal rewards, where 0/0 may arise."""
        return torch.where(self.centred == 0, 0.0, values)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def grpo(g: Groups, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) in the group (GRPO, arXiv 2402.03300, section 4.1.2; DAPO, 2503.14476, eq. 9)."""
    variance = g.sum(g.centred.square()) / (g.count - 1).clamp_min(1)
    return g.advantages(g.centred / (variance.sqrt() + epsilon))


def dr_grpo(g: Groups, epsilon: float) -> Tensor:
    """r - mean in the group, not divided by the standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return g.centred


def rloo(g: Groups, epsilon: float) -> Tensor:
    """r - mean of the others in the group (REINFORCE leave-one-out, arXiv 2402.14740)."""
    return g.advantages(g.minus_others)


def leave_one_out(g: Groups, epsilon: float) -> Tensor:
    """r - mean of the others, over their sample standard deviation + epsilon; undivided where that is 0 (NeMo RL)."""
    # With x the centred rewards (sum 0), the others have mean -x/(n-1) and square sum S - x^2.
    others = g.count - 1
    squares = g.sum(g.centred.square()) - g.centred.square() - g.centred.square() / others.clamp_min(1)
    std = (squares.clamp_min(0) / (others - 1).clamp_min(1)).sqrt()
    # Others that are equal leave a square sum of rounding errors only.
    flat = squares <= 1e-12 * g.sum(g.centred.square())
    return g.advantages(torch.where(flat, g.minus_others, g.minus_others / (std + epsilon)))


ESTIMATORS: dict[str, Callable[[Groups, float], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "leave_one_out": leave_one_out,
}
"""By the names of `loss.advantage`: (groups, epsilon) -> advantages, FP64 [N]."""


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float) -> Tensor:
    """Soft overlong punishment, FP64 [N], to add to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to -`penalty` at `max_length`, and no further.
    """
    assert 0 < buffer <= max_length, f"buffer={buffer}, max_length={max_length}"
    return -penalty * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


def informative(rewards: Tensor, groups: Tensor, baseline_mask: Tensor) -> Tensor:
    """Bool [N]: rows of groups whose rewards in the baseline differ (dynamic sampling, arXiv 2503.14476, eq. 11)."""
    index = torch.unique(groups, return_inverse=True)[1]

    def extreme(empty: float, reduce: str) -> Tensor:
        start = torch.full_like(rewards, empty)
        return start.scatter_reduce(0, index, torch.where(baseline_mask, rewards, empty), reduce)[index]

    return extreme(torch.inf, "amin") < extreme(-torch.inf, "amax")
