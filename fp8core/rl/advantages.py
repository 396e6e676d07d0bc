"""Advantages from one reward per completion: N rewards, each in the group of its prompt.

In every function `rewards` is float [N] and `groups` int [N] with any labels. The result is float [N] in the dtype of
`rewards`, computed in FP64. `keep` (bool [N]; null keeps all) takes rows out of every mean and standard deviation and
gives them advantage 0. Without it, a row that a filter rejects still moves the baseline of its siblings. Equal rewards
give exactly 0. A row without a kept sibling has no baseline and gets 0 (verl gives it the raw reward).

The two of REINFORCE++ are normalised over tokens and not over rows: `mask`, bool [N, T], marks those that count. A long
answer then moves mean and standard deviation as often as it has tokens. There 0 is what equals the mean of all tokens.
With a baseline, the lengths of other groups may shift that mean away from a group of equal rewards.

Before advantages, rewards may get penalties and scaling, and groups without a signal may be dropped (DAPO).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.rl.alignment_metrics import k1, k2, k3


def group_advantages(rewards: Tensor, groups: Tensor, epsilon: float, *, keep: Tensor | None = None) -> Tensor:
    """(r - mean) / (std + epsilon) in the group (GRPO, arXiv 2402.03300, section 4.1.2; DAPO, arXiv 2503.14476, eq. 9).

    The standard deviation is that of a sample (torch's default, so that of TRL and verl).
    """
    g = _grouped(rewards, groups, keep)
    variance = g.sum(g.centred.square()) / (g.count - 1).clamp_min(1)
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


def reinforce_plus_plus_advantages(returns: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) over all tokens of the batch (REINFORCE++, arXiv 2501.03262; sample std, as verl
    `compute_reinforce_plus_plus_outcome_advantage`, `masked_whiten`).

    `returns`: float [N], the same at each token of a row, or [N, T]; the result has its shape. Rows without a token
    in `mask` get 0.
    """
    counts = mask.double() if returns.ndim == 2 else mask.sum(dim=1).double()
    assert returns.shape == counts.shape, "returns are neither [N] nor [N, T]"
    counted = counts > 0
    # Relative to the smallest return, equal returns are exact zeros, and so are their mean and spread.
    lowest = returns.double().where(counted, torch.inf).amin()
    shifted = torch.where(counted, returns.double() - lowest, 0.0)
    total = counts.sum()
    centred = torch.where(counted, shifted - (counts * shifted).sum() / total.clamp_min(1), 0.0)
    variance = (counts * centred.square()).sum() / (total - 1).clamp_min(1)
    return torch.where(centred == 0, 0.0, centred / (variance.sqrt() + epsilon)).to(returns.dtype)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, groups: Tensor, mask: Tensor, epsilon: float, *, keep: Tensor | None = None
) -> Tensor:
    """r - mean in the group, then normalised over all tokens of the batch (REINFORCE++ with baseline, arXiv 2501.03262;
    verl `compute_reinforce_plus_plus_baseline_outcome_advantage`)."""
    centred = mean_advantages(rewards.double(), groups, keep=keep)
    kept = mask if keep is None else mask & keep[:, None]
    return reinforce_plus_plus_advantages(centred, kept, epsilon).to(rewards.dtype)


@dataclass(frozen=True)
class _Groups:
    """Statistics of groups, FP64 [N]: each row holds those of its group."""

    dtype: torch.dtype
    index: Tensor
    keep: Tensor
    count: Tensor
    centred: Tensor

    def sum(self, values: Tensor) -> Tensor:
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


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The input of an estimator; N rows, T columns.

    Attributes:
        rewards: FP64 [N].
        groups: int [N].
        keep: bool [N], rows that make the baseline of their group.
        mask: bool [N, T], tokens that the loss counts; estimators `OVER_TOKENS` alone read it.
        penalties: FP64 [N, T], what each token takes off the reward of its row: `kl_penalties`; or None.
    """

    rewards: Tensor
    groups: Tensor
    keep: Tensor
    mask: Tensor
    penalties: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """Rewards less the penalties of all tokens of their rows, [N]."""
        return self.rewards if self.penalties is None else self.rewards - self.penalties.sum(dim=1)

    @property
    def returns(self) -> Tensor:
        """Rewards less the penalties of a token and of those after it, [N, T]; without penalties [N]."""
        if self.penalties is None:
            return self.rewards
        return self.rewards[:, None] - self.penalties.flip(1).cumsum(dim=1).flip(1)


Estimator = Callable[[Scores, float], Tensor]
"""(scores, epsilon) -> advantages [N], or [N, T] where they differ by token."""

ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda s, epsilon: group_advantages(s.totals, s.groups, epsilon, keep=s.keep),
    "dr_grpo": lambda s, epsilon: mean_advantages(s.totals, s.groups, keep=s.keep),
    "rloo": lambda s, epsilon: rloo_advantages(s.totals, s.groups, keep=s.keep),
    "leave_one_out": lambda s, epsilon: leave_one_out_advantages(s.totals, s.groups, epsilon, keep=s.keep),
    "reinforce_plus_plus": lambda s, epsilon: reinforce_plus_plus_advantages(
        s.returns, s.mask & s.keep[:, None], epsilon
    ),
    "reinforce_plus_plus_baseline": lambda s, epsilon: reinforce_plus_plus_baseline_advantages(
        s.totals, s.groups, s.mask, epsilon, keep=s.keep
    ),
}
"""By the names of `loss.advantage`."""

OVER_TOKENS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Those of `ESTIMATORS` that are normalised over tokens."""


@dataclass(frozen=True)
class TurnReward:
    """A turn of an episode: row and number, its tokens `begin` to `end`, and its own reward.

    Number 0 is what the environment began with: it has no tokens of the policy, and may have a reward.
    """

    row: int
    turn: int
    begin: int
    end: int
    reward: float


def turn_advantages(scores: Scores, turns: Sequence[TurnReward], estimator: Estimator, epsilon: float) -> Tensor:
    """Advantages by turn, [N, T] and 0 between turns: a turn's return is compared with those of the same turn.

    The return is the row's reward less the rewards of the turns before, so later rewards count and earlier ones do not.
    A turn that no other episode of the group has reached has no baseline and gets 0. `turns`: of all rows, in order.
    `estimator`: one of `ESTIMATORS`, over turns in place of rows.
    """
    assert scores.penalties is None, "the configuration was checked"
    spoken, returns = _turn_returns(scores.rewards, turns)
    if not spoken:
        return torch.zeros(scores.mask.shape, dtype=scores.rewards.dtype)
    columns, rows = torch.arange(scores.mask.shape[1]), torch.tensor([turn.row for turn in spoken])
    begin, end = (torch.tensor([getattr(turn, name) for turn in spoken])[:, None] for name in ("begin", "end"))
    mask = scores.mask[rows] & (columns >= begin) & (columns < end)
    groups = _turn_groups(scores.groups, spoken)
    by_turn = estimator(Scores(rewards=returns, groups=groups, keep=scores.keep[rows], mask=mask), epsilon)
    spread = by_turn[:, None] if by_turn.ndim == 1 else by_turn
    out = torch.zeros(scores.mask.shape, dtype=by_turn.dtype)
    return out.index_add_(0, rows, torch.where((columns >= begin) & (columns < end), spread, 0.0))


def _turn_returns(rewards: Tensor, turns: Sequence[TurnReward]) -> tuple[list[TurnReward], Tensor]:
    """The policy's turns, and of each the row's reward less the rewards of the turns before."""
    spent, returns, spoken = torch.zeros_like(rewards), list[Tensor](), list[TurnReward]()
    for turn in turns:
        if turn.turn:
            spoken.append(turn)
            returns.append(rewards[turn.row] - spent[turn.row])
        spent[turn.row] += turn.reward
    return spoken, torch.stack(returns) if returns else rewards.new_empty(0)


def _turn_groups(groups: Tensor, spoken: Sequence[TurnReward]) -> Tensor:
    """A label for each turn of `spoken`, one at least; the same turns of a group share it."""
    numbers = torch.tensor([turn.turn for turn in spoken])
    return groups[torch.tensor([turn.row for turn in spoken])] * (int(numbers.max()) + 1) + numbers


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment, FP64 [N], to add to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to -`penalty` at `max_length`, and no further.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 1 and max_length={max_length}")
    return -penalty * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


def kl_penalties(old: Tensor, reference: Tensor, mask: Tensor, beta: float, estimate: str) -> Tensor:
    """`beta` times the divergence from the reference policy at each token, FP64 [N, T], to take off its row's reward.

    `old`, `reference`: log-probs, float [N, T]; `mask`: bool [N, T], elsewhere 0. Estimates as verl's
    (`kl_penalty_forward` in `verl/trainer/ppo/core_algos.py`): k1 (`kl`), abs, k2 (`mse`), and k3 (`low_var_kl`), whose
    exponent is clamped to +-20 and value to +-10.
    """
    d = torch.where(mask, reference.double() - old.double(), 0.0)
    estimates = {"k1": k1(d), "abs": d.abs(), "k2": k2(d), "k3": k3(d.clamp(-20, 20)).clamp(-10, 10)}
    return beta * estimates[estimate]


def informative(rewards: Tensor, groups: Tensor, keep: Tensor | None = None) -> Tensor:
    """Bool [N]: rows of groups whose kept rewards are not all equal (dynamic sampling, arXiv 2503.14476, eq. 11)."""
    kept = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    index = torch.unique(groups, return_inverse=True)[1]

    def extreme(empty: float, reduce: str) -> Tensor:
        start = torch.full_like(rewards, empty)
        return start.scatter_reduce(0, index, torch.where(kept, rewards, empty), reduce)[index]

    return extreme(torch.inf, "amin") < extreme(-torch.inf, "amax")


def informative_turns(
    rewards: Tensor, groups: Tensor, turns: Sequence[TurnReward], keep: Tensor | None = None
) -> Tensor:
    """As `informative` for advantages by turn: rows of groups in which kept returns of the same turn differ.

    Whole rewards say nothing about that: equal ones may be earned in different turns, and different ones in a turn
    that is past.
    """
    kept = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    spoken, returns = _turn_returns(rewards, turns)
    if not spoken:
        return torch.zeros_like(kept)
    rows = torch.tensor([turn.row for turn in spoken])
    found = informative(returns, _turn_groups(groups, spoken), kept[rows])
    return torch.isin(groups, groups[rows[found]])
