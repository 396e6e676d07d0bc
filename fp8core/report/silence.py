"""Steps without a signal: how many there were, how their completions ended, and what helps.

In such a step the rewards of every group are equal, so that no completion has an advantage. REINFORCE++ compares all
rewards of a step; there a step has no signal where all of them are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fp8core.config.run import RunConfig
from fp8core.report.chart import counted
from fp8core.rewards.scorer import OUTCOMES
from fp8core.store.metrics import CUT_OFF, OUTCOME, REWARD, SIGNAL, SPREAD, History

# The share of steps from which silence is what a reader has to know first.
MANY = 1 / 3
_MOST, _LEAST_SHOWN = 0.5, 0.005
_EQUAL = "the rewards of every group were equal"
_UNKNOWN = "choose problems that the policy solves now and then, or raise rollout.group_size"
_ADVICE = {
    "timeout": "repair the verifier or environment, or raise its timeout_seconds",
    "crashed": "repair the verifier or environment",
    "cut off": "raise rollout.max_new_tokens",
    "unparsed": "state the answer's form in data.template",
    "wrong": "choose easier problems, or raise rollout.group_size",
    "right": "choose harder problems",
}
"""By cause, the first that holds for most completions."""
_UNREWARDED = 'give each Outcome("right") of the environment its reward, which is 0 by default'


@dataclass(frozen=True)
class Silence:
    """Steps without a signal, of all steps.

    Attributes:
        shares: of their completions by outcome, and of those cut off.
        unrewarded: true where an environment gave nothing for right outcomes either.
    """

    silent: int
    steps: int
    shares: Mapping[str, float]
    unrewarded: bool = False

    @property
    def many(self) -> bool:
        """True where so many steps are silent that the run learned little."""
        return self.silent > 0 and self.silent >= self.steps * MANY

    @property
    def count(self) -> str:
        """The number of silent steps, of all."""
        return f"{self.silent} of {counted(self.steps, 'step')}"

    @property
    def reason(self) -> str:
        """The outcomes of their completions, the most frequent one first, and the share cut off."""
        ended = {name: share for name, share in self.shares.items() if share >= _LEAST_SHOWN}
        ordered = sorted(ended, key=lambda name: (name == "cut off", -ended[name]))
        return ", ".join(f"{100 * ended[name]:.0f} % {name}" for name in ordered) or _EQUAL

    @property
    def advice(self) -> str:
        """The one change that fits the cause."""
        if self.unrewarded:
            return _UNREWARDED
        cause = next((name for name in _ADVICE if self._most(name)), None)
        return _UNKNOWN if cause is None else _ADVICE[cause]

    @property
    def words(self) -> str:
        """Count and reason as a sentence."""
        count = "No step had a signal" if self.silent == self.steps else f"{self.count} had no signal"
        return f"{count}: {self.reason}"

    def _most(self, name: str) -> bool:
        # A right answer that is cut off after its end lacks nothing.
        failed = name != "cut off" or self.shares.get("right", 0.0) < _MOST
        return failed and self.shares.get(name, 0.0) >= _MOST


def silence(history: History, config: RunConfig | None) -> Silence | None:
    """The silence of a run; None where every step had a signal, or none measured it.

    None also where a teacher gives another signal, or a penalty that is part of the reward.
    """
    loss = None if config is None else config.loss
    if loss is not None and (loss.distillation.weight > 0 or loss.reward_kl > 0):
        return None
    measured = [row for row in history if SIGNAL in row]
    signal = SPREAD if loss is not None and loss.advantage == "reinforce_plus_plus" else SIGNAL
    silent = [row for row in measured if row.get(signal, row[SIGNAL]) == 0]
    if not silent:
        return None
    shares = mean_shares(silent)
    played = config is not None and config.environment is not None
    unrewarded = played and shares.get("right", 0.0) > 0 and all(row.get(REWARD) == 0 for row in silent)
    return Silence(len(silent), len(measured), shares, unrewarded)


def mean_shares(history: History) -> dict[str, float]:
    """Outcome, or `cut off` -> its share of the completions, mean of the steps that measured it."""
    names = {name: f"{OUTCOME}{name}" for name in OUTCOMES} | {"cut off": CUT_OFF}
    found = {name: [row[metric] for row in history if metric in row] for name, metric in names.items()}
    return {name: fmean(values) for name, values in found.items() if values}
