"""The diagnosis of a training: why it learned nothing and what to change, in one sentence.

In a step without a signal the scores of every group are equal, so that no completion has an advantage.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from fp8core.config.run import RunConfig, resume_command, shown_place
from fp8core.errors import printable
from fp8core.metrics.reward import OUTCOME_SHARES, REWARD, SIGNAL, VERDICT_SCORE
from fp8core.metrics.rollout import CUT_OFF, ENTROPY, LENGTH
from fp8core.report.chart import count_text, short
from fp8core.report.run_data import EDGE_STEPS, Learning
from fp8core.store.ledger import START
from fp8core.store.metrics import STEP, History
from fp8core.store.run_view import RunView

_RIGHT = OUTCOME_SHARES["right"].name
# Of all steps, those without a signal that decide; of completions, those that make a cause.
_MANY = 1 / 3
_MOST = 0.5
_MIN_SHARE = 0.005
# A fall leaves so little of the best level.
_LITTLE = 0.25
# Of eight rare events two or fewer come about with a probability of 1.4 %.
_MIN_SAMPLES = 8
_PROMPTS_OF_A_LEVEL = 32
_LEAST_RIGHT = 0.05
_SHOWN_CHARACTERS = 40


class Diagnosis(NamedTuple):
    """A cause, what shows it, and what to change.

    collapse: the last step before a policy collapsed. step: the one whose policy to go back to.
    """

    cause: str
    symptom: str
    change: str
    collapse: int | None = None
    step: int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.symptom} {self.change}"


class Fall(NamedTuple):
    """A level that fell for good after step `sound`."""

    measure: str
    best: float
    level: float
    sound: int


@dataclass(frozen=True)
class Evidence:
    """The facts that a diagnosis follows from.

    `text` is a completion of the last step, `place` the run, as commands take it.
    """

    history: History
    config: RunConfig | None
    learning: Learning
    text: str = ""
    place: str = "RUN"

    @cached_property
    def measured(self) -> History:
        return [row for row in self.history if SIGNAL.name in row]

    @cached_property
    def silent(self) -> History:
        """The steps without a signal, where they are many and rewards are what the run was to learn from."""
        if not self._needs_rewards:
            return []
        silent = [row for row in self.measured if row[SIGNAL.name] == 0]
        many = _MOST if self.learning == "too short to tell" else _MANY
        return silent if len(silent) >= many * len(self.measured) else []

    @cached_property
    def shares(self) -> dict[str, float]:
        """Outcome, or `cut off` -> its share of the completions, of the silent steps or, without, of the last ones."""
        still = self._needs_rewards and self.learning in ("not learned", "too short to tell")
        return mean_shares(self.silent or (self.measured[-EDGE_STEPS:] if still else []))

    @property
    def _needs_rewards(self) -> bool:
        """False where the run learned, or a teacher, or a penalty that is part of the reward, gave another signal."""
        loss = None if self.config is None else self.config.loss
        other = loss is not None and loss.distillation.weight > 0
        return not other and not self.learning.startswith("learned")

    def most(self, *names: str) -> bool:
        return any(self.shares.get(name, 0.0) >= _MOST for name in names)

    @property
    def ends(self) -> str:
        shares = {name: share for name, share in self.shares.items() if share >= _MIN_SHARE}
        ordered = sorted(shares, key=lambda name: (name == "cut off", -shares[name]))
        words = [f"{100 * shares[name]:.0f} % {name}" for name in ordered]
        if self.silent:
            steps = count_text(len(self.measured), "step")
            words.append(f"the scores of every group were equal in {len(self.silent)} of {steps}")
        return ", ".join(words)

    @property
    def example(self) -> str:
        begin = printable(self.text[:_SHOWN_CHARACTERS])
        more = "…" if len(self.text) > _SHOWN_CHARACTERS else ""
        return f"The last step wrote \u201c{begin}{more}\u201d. " if begin else ""

    @cached_property
    def never_right(self) -> bool:
        rows = [row for row in self.history if _RIGHT in row]
        scores = [max(row[_RIGHT], row.get(VERDICT_SCORE.name, row.get(REWARD.name, 0.0))) for row in rows]
        return bool(scores) and max(scores) <= 0

    def setting(self, key: str) -> str:
        section, _, name = key.partition(".")
        return key if self.config is None else f"{key} (now {getattr(getattr(self.config, section), name)})"


def diagnosis(evidence: Evidence) -> Diagnosis | None:
    """The likeliest cause; None where there is nothing to diagnose."""
    config = evidence.config
    fall = find_fall(evidence.history, 1 if config is None else config.rollout.prompts_per_step)
    if fall is not None:
        age = 0 if config is None or config.pipeline.mode == "synchronous" else config.pipeline.max_staleness
        # The policy that wrote the last completions that were rewarded.
        step = max(START, fall.sound - 1 - age)
        changes = [_change(fall.measure, fall.best, fall.level), *_other_changes(evidence.history, fall.sound)]
        symptom = f"Collapsed after step {fall.sound}: {', '.join(changes)}."
        change = (
            f"{evidence.example}Lower {evidence.setting('training.learning_rate')}, and start from the policy after "
            f"step {step}, which fp8-grpo export {evidence.place} --step {step} FOLDER writes."
        )
        return Diagnosis("collapsed", symptom, change, fall.sound, step)
    cause = _cause(evidence)
    if cause is None:
        return None
    name, symptom, change = cause
    return Diagnosis(name.lower(), f"{name}: {symptom}.", f"{change}.")


def _cause(evidence: Evidence) -> tuple[str, str, str] | None:
    if evidence.most("timeout", "crashed"):
        longer = ", or raise its timeout_seconds" * evidence.most("timeout")
        return "Verifier failed", evidence.ends, f"Repair the verifier or environment{longer}"
    # A right answer that is cut off after its end lacks nothing.
    if evidence.most("cut off") and not evidence.most("right"):
        return "Cut off", evidence.ends, f"Raise {evidence.setting('rollout.max_new_tokens')}"
    if evidence.never_right and evidence.most("wrong", "unparsed"):
        form = "state the answer's form in data.template"
        other = form if evidence.most("unparsed") else "choose easier problems or a stronger model"
        change = f"If such texts are right, change {evidence.setting('reward.verifier')}, else {other}"
        return "Verifier refuses all", evidence.ends, f"{evidence.example}{change}"
    if evidence.silent and evidence.most("right"):
        return "No signal", evidence.ends, "Choose harder problems"
    if evidence.silent:
        problems = "Choose problems that the policy solves now and then"
        return "No signal", evidence.ends, f"{problems}, or raise {evidence.setting('rollout.group_size')}"
    return None


def _change(name: str, before: float, after: float) -> str:
    return f"{name} {'fell' if after < before else 'rose'} from {short(before)} to {short(after)}"


def _other_changes(history: History, step: int) -> list[str]:
    """Changes from a step to the mean of all later ones, by a factor of more than two."""
    changes = []
    for name, metric in {"entropy": ENTROPY, "length": LENGTH, "groups with a signal": SIGNAL}.items():
        rows = [row for row in history if metric.name in row]
        early = [row[metric.name] for row in rows if row[STEP] <= step]
        late = [row[metric.name] for row in rows if row[STEP] > step]
        if early and late and not early[-1] / 2 <= fmean(late) <= 2 * early[-1]:
            changes.append(_change(name, early[-1], fmean(late)))
    return changes


def find_fall(history: History, prompts: int) -> Fall | None:
    """The fall of the share of right answers, else of the mean reward; None where chance may have made it.

    `prompts`: of a step. They are independent of one another, completions of one are not.
    """
    right = max((row[_RIGHT] for row in history if _RIGHT in row), default=0.0) >= _LEAST_RIGHT
    metric, measure = (_RIGHT, "the share of right answers") if right else (REWARD.name, "the mean reward")
    rows = [row for row in history if math.isfinite(row.get(metric, math.nan))]
    values = [row[metric] for row in rows]
    # The floor of a reward with penalties is not known.
    if not values or min(values) < 0:
        return None
    # A level is that of a few dozen prompts, where there are so many.
    window = max(1, min(math.ceil(_PROMPTS_OF_A_LEVEL / prompts), len(values) // 2))
    best = max(fmean(values[start : start + window]) for start in range(len(values) - window + 1))
    sound, end = (max(place for place, value in enumerate(values, 1) if value >= part * best) for part in (0.75, 0.5))
    if best == 0 or end == len(values):
        return None
    level = fmean(values[end:])
    # So many right answers are expected at the best level, before and after, that a quarter of them is no chance.
    expected = best / max(1.0, *values) * prompts * min(window, len(values) - end)
    after = mean_shares(rows[end:])
    broken = after.get("timeout", 0.0) + after.get("crashed", 0.0) >= _MOST
    if level > _LITTLE * best or expected < _MIN_SAMPLES or broken:
        return None
    return Fall(measure, best, level, int(rows[sound - 1][STEP]))


def mean_shares(history: History) -> dict[str, float]:
    """Outcome, or `cut off` -> its share of the completions, mean of the steps that measured it."""
    shown = {**OUTCOME_SHARES, "cut off": CUT_OFF}
    measured = {name: [row[each.name] for row in history if each.name in row] for name, each in shown.items()}
    return {name: fmean(values) for name, values in measured.items() if values}


def run_commands(view: RunView) -> tuple[str, str]:
    name = view.folder.name
    if view.config is None:
        return name, f"fp8-grpo resume {name}"
    return shown_place(view.config, name), resume_command(view.config, name)
