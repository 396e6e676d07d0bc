"""Advantages from one reward per completion: N rewards, each in the group of its prompt.

Rows that are not kept are in no mean and no standard deviation, and get 0. Equal rewards give exactly 0. A row without
a kept sibling gets 0 (verl gives it the raw reward). Standard deviations are a sample's, as in TRL, verl, SkyRL, slime.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8core.rl.alignment_metrics import k1, k2, k3


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The input of an estimator; N rows, T columns.

    Attributes:
        rewards: FP64 [N].
        groups: int [N], any labels.
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


@dataclass(frozen=True)
class _Groups:
    """Statistics of groups, FP64 [N]: each row holds those of its group."""

    index: Tensor
    keep: Tensor
    count: Tensor
    centred: Tensor

    @classmethod
    def of(cls, scores: Scores) -> "_Groups":
        rewards, keep = scores.totals, scores.keep
        assert keep.dtype == torch.bool, f"keep is {keep.dtype}, not bool"
        assert rewards.shape == scores.groups.shape == keep.shape == (len(rewards),), "rewards, groups and keep are [N]"
        index = torch.unique(scores.groups, return_inverse=True)[1]
        # Relative to the group's smallest reward, equal rewards are exact zeros, and so are their mean and spread.
        infinity = torch.full_like(rewards, torch.inf, dtype=torch.float64)
        lowest = infinity.scatter_reduce(0, index, torch.where(keep, rewards.double(), torch.inf), "amin")
        shifted = torch.where(keep, rewards.double() - lowest[index], 0.0)
        count = _group_sum(keep.double(), index)
        mean = _group_sum(shifted, index) / count.clamp_min(1)
        return cls(index, keep, count, torch.where(keep, shifted - mean, 0.0))

    @property
    def minus_others(self) -> Tensor:
        """r - mean of the others, which is (r - mean) n / (n - 1)."""
        return self.centred * self.count / (self.count - 1).clamp_min(1)

    def sum(self, values: Tensor) -> Tensor:
        return _group_sum(torch.where(self.keep, values, 0.0), self.index)

    def advantages(self, values: Tensor) -> Tensor:
        """`values`, but 0 for rows at their group's mean: rejected, alone, or of equal rewards, where 0/0 may arise."""
        return torch.where(self.centred == 0, 0.0, values)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def grpo(scores: Scores, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) in the group (GRPO, arXiv 2402.03300, section 4.1.2; DAPO, 2503.14476, eq. 9)."""
    g = _Groups.of(scores)
    variance = g.sum(g.centred.square()) / (g.count - 1).clamp_min(1)
    return g.advantages(g.centred / (variance.sqrt() + epsilon))


def dr_grpo(scores: Scores, epsilon: float) -> Tensor:
    """r - mean in the group, not divided by the standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    g = _Groups.of(scores)
    return g.advantages(g.centred)


def rloo(scores: Scores, epsilon: float) -> Tensor:
    """r - mean of the others in the group (REINFORCE leave-one-out, arXiv 2402.14740)."""
    g = _Groups.of(scores)
    return g.advantages(g.minus_others)


def leave_one_out(scores: Scores, epsilon: float) -> Tensor:
    """r - mean of the others, over their sample standard deviation + epsilon; undivided where that is 0 (NeMo RL)."""
    g = _Groups.of(scores)
    # With x the centred rewards (sum 0), the others have mean -x/(n-1) and square sum S - x^2.
    others = g.count - 1
    squares = g.sum(g.centred.square()) - g.centred.square() - g.centred.square() / others.clamp_min(1)
    std = (squares.clamp_min(0) / (others - 1).clamp_min(1)).sqrt()
    # Others that are equal leave a square sum of rounding errors only.
    flat = squares <= 1e-12 * g.sum(g.centred.square())
    return g.advantages(torch.where(flat, g.minus_others, g.minus_others / (std + epsilon)))


def reinforce_plus_plus(scores: Scores, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) over all tokens of the batch (REINFORCE++, arXiv 2501.03262; verl
    `compute_reinforce_plus_plus_outcome_advantage`, `masked_whiten`)."""
    return _whitened(scores.returns, scores.mask & scores.keep[:, None], epsilon)


def reinforce_plus_plus_baseline(scores: Scores, epsilon: float) -> Tensor:
    """r - mean in the group, then normalised over all tokens of the batch (REINFORCE++ with baseline, arXiv 2501.03262;
    verl `compute_reinforce_plus_plus_baseline_outcome_advantage`)."""
    return _whitened(dr_grpo(scores, epsilon), scores.mask & scores.keep[:, None], epsilon)


def _whitened(returns: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Normalised over the tokens of `mask`, bool [N, T]; returns are FP64 [N], the same at each token, or [N, T].

    A row counts as often as it has tokens; rows without one get 0.
    """
    counts = mask.double() if returns.ndim == 2 else mask.sum(dim=1).double()
    assert returns.shape == counts.shape, "returns are neither [N] nor [N, T]"
    counted = counts > 0
    # Relative to the smallest return, equal returns are exact zeros, and so are their mean and spread.
    lowest = returns.where(counted, torch.inf).amin()
    shifted = torch.where(counted, returns - lowest, 0.0)
    total = counts.sum()
    centred = torch.where(counted, shifted - (counts * shifted).sum() / total.clamp_min(1), 0.0)
    variance = (counts * centred.square()).sum() / (total - 1).clamp_min(1)
    return torch.where(centred == 0, 0.0, centred / (variance.sqrt() + epsilon))


Estimator = Callable[[Scores, float], Tensor]
"""(scores, epsilon) -> advantages, FP64 [N], or [N, T] where they differ by token."""

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "leave_one_out": leave_one_out,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""By the names of `loss.advantage`."""

OVER_TOKENS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Those of `ESTIMATORS` that are normalised over tokens."""


@dataclass(frozen=True)
class TurnReward:
    """A turn of an episode: row and number, its tokens `begin` to `end`, and its own reward.

    Number 0 is what the environment began with: it has no tokens of the policy.
    """

    row: int
    turn: int
    begin: int
    end: int
    reward: float


def turn_advantages(scores: Scores, turns: Sequence[TurnReward], estimator: Estimator, epsilon: float) -> Tensor:
    """Advantages by turn, [N, T] and 0 between turns: a turn's return is compared with those of the same turn.

    The return is the row's reward less the rewards of the turns before. `turns`: of all rows, in order.
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
    """A label for each turn, one at least; the same turns of a group share it."""
    numbers = torch.tensor([turn.turn for turn in spoken])
    return groups[torch.tensor([turn.row for turn in spoken])] * (int(numbers.max()) + 1) + numbers


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float) -> Tensor:
    """Soft overlong punishment, FP64 [N], to add to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    0 up to `max_length - buffer` tokens, then falling linearly to -`penalty` at `max_length`, and no further.
    """
    assert 0 < buffer <= max_length, f"buffer={buffer}, max_length={max_length}"
    return -penalty * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


def kl_penalties(old: Tensor, reference: Tensor, mask: Tensor, beta: float, estimate: str) -> Tensor:
    """`beta` times the divergence from the reference policy at each token, FP64 [N, T], to take off its row's reward.

    `old`, `reference`: log-probs, float [N, T]; `mask`: bool [N, T], elsewhere 0. Estimates are those of verl
    (`kl_penalty_forward` in `verl/trainer/ppo/core_algos.py`).
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
    """As `informative` for advantages by turn: rows of groups in which kept returns of the same turn differ."""
    kept = torch.ones_like(groups, dtype=torch.bool) if keep is None else keep
    spoken, returns = _turn_returns(rewards, turns)
    if not spoken:
        return torch.zeros_like(kept)
    rows = torch.tensor([turn.row for turn in spoken])
    found = informative(returns, _turn_groups(groups, spoken), kept[rows])
    return torch.isin(groups, groups[rows[found]])
