"""The diagnosis of a training: why it learned nothing and what to change, in one sentence.

The console, the report, MLflow and summary.json show this sentence. `_RULES` has a row for each cause, the likeliest
first; the first that fits is the diagnosis.

In a step without a signal the scores of every group are equal, so that no completion has an advantage. REINFORCE++
compares all rewards of a step; there a step has no signal where all of them are equal.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
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
from fp8core.store.metrics import (
    CUT_OFF,
    ENTROPY,
    LENGTH,
    OUTCOME,
    REWARD,
    SIGNAL,
    SPREAD,
    STEP,
    History,
)
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
class Evidence:
    """The facts that a diagnosis follows from; `config` is None where it cannot be read.

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
        loss = None if self.config is None else self.config.loss
        if not self._needs_rewards:
            return []
        signal = SPREAD if loss is not None and loss.advantage == "reinforce_plus_plus" else SIGNAL
        silent = [row for row in self.measured if row.get(signal, row[SIGNAL]) == 0]
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
        other = loss is not None and (loss.distillation.weight > 0 or loss.reward_kl > 0)
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

    @cached_property
    def fall(self) -> "Fall | None":
        """The fall of right answers, or of the reward, for good: to nothing, or to little by a degenerate policy."""
        fall = _find_fall(self.history, 1 if self.config is None else self.config.rollout.prompts_per_step)
        if fall is None or _mean(fall.after, f"{OUTCOME}timeout") + _mean(fall.after, f"{OUTCOME}crashed") >= _MOST:
            return None
        degenerate = fall.entropy_lost or fall.length_lost or is_repetitive(self.texts)
        return fall if degenerate or fall.level <= _NOTHING * fall.best else None

    @property
    def sound_step(self) -> int:
        """The step after which the policy was sound: it wrote the last completions that were rewarded."""
        assert self.fall is not None, "the policy has collapsed"
        ahead = self.config is not None and self.config.pipeline.mode != "synchronous"
        return max(START, self.fall.sound - 1 - (self.config.pipeline.max_staleness if ahead and self.config else 0))

    def setting(self, key: str) -> str:
        section, _, name = key.partition(".")
        return key if self.config is None else f"{key} (now {getattr(getattr(self.config, section), name)})"


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
    def entropy_lost(self) -> bool:
        before, after = _mean(self.before, ENTROPY), _mean(self.after, ENTROPY)
        return after < min(_NO_ENTROPY, before / 4) or after > 2 * before + _ENTROPY_JUMP

    @property
    def length_lost(self) -> bool:
        """True where completions are more than twice as long now, or less than half as long."""
        before, after = _mean(self.before, LENGTH), _mean(self.after, LENGTH)
        return not before / 2 <= after <= before * 2

    @property
    def words(self) -> str:
        numbers = [f"{self.measure} fell from {self.best:.3g} to {self.level:.3g}"]
        for name, metric, unit in (("entropy", ENTROPY, "nats a token"), ("length", LENGTH, "tokens")):
            if any(metric in row for row in self.before):
                numbers.append(f"{name} {_mean(self.before, metric):.3g} to {_mean(self.after, metric):.3g} {unit}")
        return ", ".join(numbers)


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
    largest = max(1.0, *values)
    # So many right answers are expected at the best level, before and after, that a quarter of them is no chance.
    expected = best / largest * prompts * min(window, len(values) - end)
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


@dataclass(frozen=True)
class _Rule:
    cause: str
    fits: Callable[[Evidence], bool]
    seen: Callable[[Evidence], str]
    change: Callable[[Evidence], str]


def _refusal(evidence: Evidence) -> str:
    form = "state the answer's form in data.template"
    other = form if evidence.most("unparsed") else "choose easier problems or a stronger model"
    return f"if such texts are right, change {evidence.setting('reward.verifier')}, else {other}"


def _no_signal(evidence: Evidence) -> str:
    if evidence.most("right"):
        return "choose harder problems"
    if not evidence.never_right and not any(row.get(_RIGHT) for row in evidence.history):
        return f"let {evidence.setting('reward.verifier')} give different completions different rewards"
    return f"choose problems that the policy solves now and then, or raise {evidence.setting('rollout.group_size')}"


def _no_reward(evidence: Evidence) -> bool:
    played = evidence.config is not None and evidence.config.environment is not None
    right = evidence.shares.get("right", 0.0) > 0
    return played and right and bool(evidence.silent) and not any(row.get(REWARD) for row in evidence.silent)


_RULES = (
    _Rule(
        "Collapsed",
        lambda e: e.fall is not None,
        lambda e: f"after step {e.fall.sound} {e.fall.words}{e.example}" if e.fall else "",
        lambda e: (
            f"lower {e.setting('training.learning_rate')}, and start from the policy after step {e.sound_step}, "
            f"which fp8-grpo export {e.place} --step {e.sound_step} FOLDER writes"
        ),
    ),
    _Rule(
        "Verifier failed",
        lambda e: e.most("timeout", "crashed"),
        lambda e: e.ends,
        lambda e: "repair the verifier or environment" + ", or raise its timeout_seconds" * e.most("timeout"),
    ),
    _Rule(
        "No reward",
        _no_reward,
        lambda e: e.ends,
        lambda e: 'give each Outcome("right") of the environment its reward, which is 0 by default',
    ),
    # A right answer that is cut off after its end lacks nothing.
    _Rule(
        "Cut off",
        lambda e: e.most("cut off") and not e.most("right"),
        lambda e: e.ends,
        lambda e: f"raise {e.setting('rollout.max_new_tokens')}",
    ),
    _Rule(
        "Verifier refuses all",
        lambda e: e.never_right and e.most("wrong", "unparsed") and not is_repetitive(e.texts),
        lambda e: f"{e.ends}{e.example}",
        _refusal,
    ),
    _Rule("No signal", lambda e: bool(e.silent), lambda e: e.ends, _no_signal),
    _Rule(
        "Too short to tell",
        lambda e: e.learning == "too short to tell" and not e.left,
        lambda e: counted(_last_step(e), "step"),
        lambda e: f"train on: {e.resume} --set steps={max(2 * _last_step(e), 2 * EDGE_STEPS)}",
    ),
)


def _last_step(evidence: Evidence) -> int:
    return max((int(row[STEP]) for row in evidence.history), default=START)


def diagnosis(evidence: Evidence) -> Diagnosis | None:
    rule = next((rule for rule in _RULES if rule.fits(evidence)), None)
    if rule is None:
        return None
    change = rule.change(evidence)
    sentence = f"{rule.cause}: {rule.seen(evidence)}. {change[0].upper()}{change[1:]}."
    return Diagnosis(rule.cause.lower(), sentence, evidence.sound_step if evidence.fall else None)


def diagnose(view: RunView, history: History, learning: Learning, left: int = 0) -> Diagnosis | None:
    place, resume = run_commands(view)
    return diagnosis(Evidence(history, view.config, learning, _last_texts(view), place, resume, left))


def run_commands(view: RunView) -> tuple[str, str]:
    """The run as commands take it, and the command that continues it."""
    config = view.config
    name = view.folder.name
    if config is None:
        return name, f"fp8-grpo resume {name}"
    return shown_place(config, name), resume_command(config, name)


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
