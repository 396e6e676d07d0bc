"""The diagnosis of a training: why it learned nothing and what to change, in one sentence.

In a step without a signal the scores of every group are equal, so that no completion has an advantage.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from fp8core.config.run import RunConfig, resume_command, shown_place
from fp8core.errors import printable
from fp8core.report.chart import counted
from fp8core.report.summary import EDGE_STEPS, Learning
from fp8core.report.tokens import was_removed
from fp8core.rewards.scorer import OUTCOMES
from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.ledger import START
from fp8core.store.metrics import CUT_OFF, ENTROPY, LENGTH, OUTCOME, REWARD, SIGNAL, STEP, History
from fp8core.store.run_view import RunView

_RIGHT = f"{OUTCOME}right"
# Of all steps, those without a signal that decide; of completions, those that make a cause.
_MANY, _MOST, _LEAST_SHOWN = 1 / 3, 0.5, 0.005
# A fall leaves so little of the best level if other signs confirm it, and nothing if none does.
_LITTLE, _NOTHING = 0.25, 0.05
# Of eight rare events two or fewer come about with a probability of 1.4 %.
_EXPECTED = 8
_PROMPTS_OF_A_LEVEL, _LEAST_RIGHT = 32, 0.05
_NO_ENTROPY, _ENTROPY_JUMP = 0.05, 0.2
_TEXTS, _TEXT_CHARACTERS, _SHOWN_CHARACTERS = 64, 800, 40
# Texts repeat themselves if one character is so much of them, or if so little is left of them when compressed.
_ONE_CHARACTER, _COMPRESSED, _LEAST_BYTES = 0.5, 0.15, 400


@dataclass(frozen=True)
class Diagnosis:
    """A cause, the sentence about it and, for a policy that has collapsed, the step to go back to."""

    cause: str
    sentence: str
    step: int | None = None


@dataclass(frozen=True)
class Fall:
    """A level that fell for good after step `sound`, and the steps at its best and after the fall."""

    measure: str
    best: float
    level: float
    sound: int
    before: History
    after: History

    @property
    def is_degenerate(self) -> bool:
        """True where entropy is gone or has jumped, or completions are twice as long now, or half as long."""
        before, after = _mean(self.before, ENTROPY), _mean(self.after, ENTROPY)
        length, length_now = _mean(self.before, LENGTH), _mean(self.after, LENGTH)
        entropy_lost = after < min(_NO_ENTROPY, before / 4) or after > 2 * before + _ENTROPY_JUMP
        return entropy_lost or not length / 2 <= length_now <= length * 2

    @property
    def words(self) -> str:
        numbers = [f"{self.measure} fell from {self.best:.3g} to {self.level:.3g}"]
        for name, metric, unit in (("entropy", ENTROPY, "nats a token"), ("length", LENGTH, "tokens")):
            if any(metric in row for row in self.before):
                numbers.append(f"{name} {_mean(self.before, metric):.3g} to {_mean(self.after, metric):.3g} {unit}")
        return ", ".join(numbers)


@dataclass(frozen=True)
class Evidence:
    """The facts that a diagnosis follows from.

    `texts` are completions of the last step, one of each prompt. `place` is the run, as commands take it, and `left`
    the number of steps that it still has to make.
    """

    history: History
    config: RunConfig | None
    learning: Learning
    texts: Sequence[str] = ()
    place: str = "RUN"
    resume: str = "fp8-grpo resume RUN"
    left: int = 0

    @cached_property
    def measured(self) -> History:
        return [row for row in self.history if SIGNAL in row]

    @cached_property
    def silent(self) -> History:
        """The steps without a signal, where they are many and rewards are what the run was to learn from."""
        if not self._needs_rewards:
            return []
        silent = [row for row in self.measured if row[SIGNAL] == 0]
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
        shares = {name: share for name, share in self.shares.items() if share >= _LEAST_SHOWN}
        ordered = sorted(shares, key=lambda name: (name == "cut off", -shares[name]))
        words = [f"{100 * shares[name]:.0f} % {name}" for name in ordered]
        if self.silent:
            steps = counted(len(self.measured), "step")
            words.append(f"the scores of every group were equal in {len(self.silent)} of {steps}")
        return ", ".join(words)

    @property
    def example(self) -> str:
        if not self.texts:
            return ""
        begin = printable(self.texts[0][:_SHOWN_CHARACTERS])
        return f"; the last step wrote \u201c{begin}{'…' * (len(self.texts[0]) > _SHOWN_CHARACTERS)}\u201d"

    @cached_property
    def never_right(self) -> bool:
        rows = [row for row in self.history if _RIGHT in row]
        scores = [max(row[_RIGHT], row.get("reward/verdict", row.get(REWARD, 0.0))) for row in rows]
        return bool(scores) and max(scores) <= 0

    @property
    def no_reward(self) -> bool:
        """True where an environment gave nothing for right outcomes."""
        played = self.config is not None and self.config.environment is not None
        right = self.shares.get("right", 0.0) > 0
        return played and right and bool(self.silent) and not any(row.get(REWARD) for row in self.silent)

    @cached_property
    def fall(self) -> Fall | None:
        """The fall of right answers, or of the reward, for good: to nothing, or to little by a degenerate policy."""
        fall = _find_fall(self.history, 1 if self.config is None else self.config.rollout.prompts_per_step)
        if fall is None or _mean(fall.after, f"{OUTCOME}timeout") + _mean(fall.after, f"{OUTCOME}crashed") >= _MOST:
            return None
        degenerate = fall.is_degenerate or is_repetitive(self.texts)
        return fall if degenerate or fall.level <= _NOTHING * fall.best else None

    def setting(self, key: str) -> str:
        section, _, name = key.partition(".")
        return key if self.config is None else f"{key} (now {getattr(getattr(self.config, section), name)})"


def diagnosis(evidence: Evidence) -> Diagnosis | None:
    """The likeliest cause; None where there is nothing to diagnose."""
    if (fall := evidence.fall) is not None:
        config = evidence.config
        age = 0 if config is None or config.pipeline.mode == "synchronous" else config.pipeline.max_staleness
        # The policy that wrote the last completions that were rewarded.
        step = max(START, fall.sound - 1 - age)
        change = (
            f"Lower {evidence.setting('training.learning_rate')}, and start from the policy after step {step}, which "
            f"fp8-grpo export {evidence.place} --step {step} FOLDER writes"
        )
        seen = f"after step {fall.sound} {fall.words}{evidence.example}"
        return Diagnosis("collapsed", f"Collapsed: {seen}. {change}.", step)
    found = _cause(evidence)
    if found is None:
        return None
    cause, seen, change = found
    return Diagnosis(cause.lower(), f"{cause}: {seen}. {change}.")


def _cause(evidence: Evidence) -> tuple[str, str, str] | None:
    """A cause, what shows it, and what to change."""
    if evidence.most("timeout", "crashed"):
        longer = ", or raise its timeout_seconds" * evidence.most("timeout")
        return "Verifier failed", evidence.ends, f"Repair the verifier or environment{longer}"
    if evidence.no_reward:
        change = 'Give each Outcome("right") of the environment its reward, which is 0 by default'
        return "No reward", evidence.ends, change
    # A right answer that is cut off after its end lacks nothing.
    if evidence.most("cut off") and not evidence.most("right"):
        return "Cut off", evidence.ends, f"Raise {evidence.setting('rollout.max_new_tokens')}"
    if evidence.never_right and evidence.most("wrong", "unparsed") and not is_repetitive(evidence.texts):
        form = "state the answer's form in data.template"
        other = form if evidence.most("unparsed") else "choose easier problems or a stronger model"
        change = f"If such texts are right, change {evidence.setting('reward.verifier')}, else {other}"
        return "Verifier refuses all", f"{evidence.ends}{evidence.example}", change
    if evidence.silent:
        return "No signal", evidence.ends, _signal(evidence)
    if evidence.learning == "too short to tell" and not evidence.left:
        last = max((int(row[STEP]) for row in evidence.history), default=START)
        change = f"Train on: {evidence.resume} --set steps={max(2 * last, 2 * EDGE_STEPS)}"
        return "Too short to tell", counted(last, "step"), change
    return None


def _signal(evidence: Evidence) -> str:
    if evidence.most("right"):
        return "Choose harder problems"
    if not evidence.never_right and not any(row.get(_RIGHT) for row in evidence.history):
        return f"Let {evidence.setting('reward.verifier')} give different completions different rewards"
    return f"Choose problems that the policy solves now and then, or raise {evidence.setting('rollout.group_size')}"


def _find_fall(history: History, prompts: int) -> Fall | None:
    """The fall of the share of right answers, else of the mean reward; None where chance may have made it.

    `prompts`: of a step. They are independent of one another, completions of one are not.
    """
    right = max((row[_RIGHT] for row in history if _RIGHT in row), default=0.0) >= _LEAST_RIGHT
    metric, measure = (_RIGHT, "the share of right answers") if right else (REWARD, "the mean reward")
    rows = [row for row in history if math.isfinite(row.get(metric, math.nan))]
    values = [row[metric] for row in rows]
    # The floor of a reward with penalties is not known.
    if not values or min(values) < 0:
        return None
    # A level is that of a few dozen prompts, where there are so many.
    window = max(1, min(math.ceil(_PROMPTS_OF_A_LEVEL / prompts), len(values) // 2))
    best, start = max((fmean(values[start : start + window]), start) for start in range(len(values) - window + 1))
    sound, end = (max(place for place, value in enumerate(values, 1) if value >= part * best) for part in (0.75, 0.5))
    if best == 0 or end == len(values):
        return None
    level = fmean(values[end:])
    # So many right answers are expected at the best level, before and after, that a quarter of them is no chance.
    expected = best / max(1.0, *values) * prompts * min(window, len(values) - end)
    if level > _LITTLE * best or expected < _EXPECTED:
        return None
    return Fall(measure, best, level, int(rows[sound - 1][STEP]), rows[start : start + window], rows[end:])


def is_repetitive(texts: Sequence[str]) -> bool:
    """True where answers to different prompts are one character above all, or the same phrases again and again."""
    joined, raw = "".join("".join(text.split()) for text in texts), "\n".join(texts).encode(errors="replace")
    one = max(Counter(joined).values(), default=0) > _ONE_CHARACTER * len(joined)
    return one or (len(raw) >= _LEAST_BYTES and len(zlib.compress(raw)) < _COMPRESSED * len(raw))


def mean_shares(history: History) -> dict[str, float]:
    """Outcome, or `cut off` -> its share of the completions, mean of the steps that measured it."""
    names = {name: f"{OUTCOME}{name}" for name in OUTCOMES} | {"cut off": CUT_OFF}
    return {name: _mean(history, metric) for name, metric in names.items() if any(metric in row for row in history)}


def _mean(history: History, metric: str) -> float:
    return fmean([row[metric] for row in history if metric in row] or [0.0])


def diagnose(view: RunView, history: History, learning: Learning, left: int = 0) -> Diagnosis | None:
    place, resume = run_commands(view)
    return diagnosis(Evidence(history, view.config, learning, _last_texts(view), place, resume, left))


def run_commands(view: RunView) -> tuple[str, str]:
    """The run as commands take it, and the command that continues it."""
    name = view.folder.name
    if view.config is None:
        return name, f"fp8-grpo resume {name}"
    return shown_place(view.config, name), resume_command(view.config, name)


def _last_texts(view: RunView) -> list[str]:
    commit = max(view.commits, key=lambda commit: commit.step, default=None)
    refs = [] if commit is None else commit.artifacts.values()
    ref = next((ref for ref in refs if ref.kind == "rollouts" and not was_removed(view, ref)), None)
    if ref is None:
        return []
    try:
        table = ArtifactStore(view.folder).get_table(ref, ["group", "text"])
    except ArtifactError:
        return []
    texts: dict[int, str] = {}
    for group, text in zip(table["group"].to_pylist(), table["text"].to_pylist(), strict=True):
        texts.setdefault(group, text[:_TEXT_CHARACTERS])
    return list(texts.values())[:_TEXTS]
