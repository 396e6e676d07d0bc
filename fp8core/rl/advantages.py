"""Advantages from one reward per completion: N rewards, each in the group of its prompt.

In every function `rewards` is float [N], `groups` int [N] with any labels, and the result float [N] in the dtype of
`rewards`, computed in FP64. `keep` (bool [N]; null keeps all) takes rows out of every mean and standard deviation and
gives them advantage 0: without it, a row that a filter rejects still moves the baseline of its siblings. Equal
rewards give exactly 0. A row without a kept sibling has no baseline and gets 0 (verl gives it the raw reward).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, groups: Tensor, epsilon: float, *, keep: Tensor | None = None, ddof: int = 1
) -> Tensor:
    """(r - mean) / (std + epsilon) in the group (GRPO, arXiv 2402.03300, section 4.1.2; DAPO, arXiv 2503.14476, eq. 9).

    `ddof`: 1 for the sample standard deviation (torch's default, so that of TRL and verl), 0 for the population's.
    """
    g = _grouped(rewards, groups, keep)
    variance = g.sum(g.centred.square()) / (g.count - ddof).clamp_min(1)
    return g.advantages(g.centred / (variance.sqrt() + epsilon))


def mean_advantages(rewards: Tensor, groups: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """r - mean in the group, not divided by the standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    g = _grouped(rewards, groups, keep)
    return g.advantages(g.centred)


def rloo_advantages(rewards: Tensor, groups: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """r - mean of the others in the group (REINFORCE leave-one-out, arXiv 2402.14740)."""
    g = _grouped(rewards, groups, keep)
    return g.advantages(_minus_others(g))


def leave_one_out_advantages(rewards: Tensor, groups: Tensor, epsilon: float, *, keep: Tensor | None = None) -> Tensor:
    """r - mean of the others, over their sample standard deviation + epsilon; undivided where that is 0 (NeMo RL).

    Both statistics leave the row itself out, so each row of a group has its own.
    """
    g = _grouped(rewards, groups, keep)
    advantages = _minus_others(g)
    # With x the centred rewards (sum 0), the others have mean -x/(n-1) and square sum S - x^2.
    others = g.count - 1
    squares = g.sum(g.centred.square()) - g.centred.square() - g.centred.square() / others.clamp_min(1)
    std = (squares.clamp_min(0) / (others - 1).clamp_min(1)).sqrt()
    # Others that are equal leave a square sum of rounding errors only.
    flat = squares <= 1e-12 * g.sum(g.centred.square())
    return g.advantages(torch.where(flat, advantages, advantages / (std + epsilon)))


def reinforce_plus_plus_advantages(rewards: Tensor, epsilon: float, *, keep: Tensor | None = None) -> Tensor:
    """(r - mean) / (std + epsilon) over the whole batch, population std (REINFORCE++, arXiv 2501.03262)."""
    return group_advantages(rewards, torch.zeros_like(rewards, dtype=torch.long), epsilon, keep=keep, ddof=0)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, groups: Tensor, epsilon: float, *, keep: Tensor | None = None
) -> Tensor:
    """r - mean in the group, then normalised over the whole batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    centred = mean_advantages(rewards.double(), groups, keep=keep)
    return reinforce_plus_plus_advantages(centred, epsilon, keep=keep).to(rewards.dtype)


@dataclass(frozen=True)
class _Groups:
    """Statistics of groups, FP64 [N]: each row holds those of its group."""

    dtype: torch.dtype
    index: Tensor
    keep: Tensor
    count: Tensor
    centred: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the kept rows of each row's group."""
        return _group_sum(torch.where(self.keep, values, 0.0), self.index)

    def advantages(self, values: Tensor) -> Tensor:
        """`values`, but 0 for rows at their group's mean: rejected, alone, or of equal rewards, where 0/0 may arise."""
        return torch.where(self.centred == 0, 0.0, values).to(self.dtype)


def _grouped(rewards: Tensor, groups: Tensor, keep: Tensor | None) -> _Groups:
    kept = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    assert kept.dtype == torch.bool, f"keep is {kept.dtype}, not bool"
    assert rewards.shape == groups.shape == kept.shape == (len(rewards),), "rewards, groups and keep must all be [N]"
    index = torch.unique(groups, return_inverse=True)[1]
    # Relative to the group's smallest reward, equal rewards are exact zeros, and so are their mean and spread.
    infinity = torch.full_like(rewards, torch.inf, dtype=torch.float64)
    lowest = infinity.scatter_reduce(0, index, torch.where(kept, rewards.double(), torch.inf), "amin")
    shifted = torch.where(kept, rewards.double() - lowest[index], 0.0)
    count = _group_sum(kept.double(), index)
    mean = _group_sum(shifted, index) / count.clamp_min(1)
    return _Groups(rewards.dtype, index, kept, count, torch.where(kept, shifted - mean, 0.0))


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def _minus_others(g: _Groups) -> Tensor:
    """r - mean of the others, which is (r - mean) n / (n - 1)."""
    return g.centred * g.count / (g.count - 1).clamp_min(1)


Estimator = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(rewards, groups, epsilon, keep) -> advantages."""

ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, epsilon, keep: group_advantages(rewards, groups, epsilon, keep=keep),
    "dr_grpo": lambda rewards, groups, epsilon, keep: mean_advantages(rewards, groups, keep=keep),
    "rloo": lambda rewards, groups, epsilon, keep: rloo_advantages(rewards, groups, keep=keep),
    "leave_one_out": lambda rewards, groups, epsilon, keep: leave_one_out_advantages(
        rewards, groups, epsilon, keep=keep
    ),
    "reinforce_plus_plus": lambda rewards, groups, epsilon, keep: reinforce_plus_plus_advantages(
        rewards, epsilon, keep=keep
    ),
    "reinforce_plus_plus_baseline": lambda rewards, groups, epsilon, keep: reinforce_plus_plus_baseline_advantages(
        rewards, groups, epsilon, keep=keep
    ),
}
"""By the names of `loss.advantage`."""
