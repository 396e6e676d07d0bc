"""The conclusion on a training: learned or not, equal policies or by how much, its speed, and the one action to take.

A change counts when it is larger than `NOISE` standard errors. That of the reward is between the first and the last
steps, which are correlated. That of held-out accuracy is between the first and the last evaluation.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fp8core.alignment.bounds import has_evidence, unverifiable
from fp8core.metrics.reward import REWARD
from fp8core.metrics.rollout import TOKENS, UNVERIFIABLE
from fp8core.report.chart import Collapse, count_text, format_tmpe, short, three_decimals
from fp8core.report.diagnosis import Diagnosis, Evidence, diagnosis, run_commands
from fp8core.report.run_data import EDGE_STEPS, Learning, RunData, compared_tokens, edge_steps, first_steps, last_steps
from fp8core.rl.alignment_metrics import COMPARED_TOKENS, TMPE, TOKENS_DIFFERING
from fp8core.store.ledger import START, BoundEntry
from fp8core.store.metrics import HELDOUT, History, series

NOISE = 3.0
FEWEST_VALUES = 10
# Of the quadratic and of the correlation.
_MIN_FIT_POINTS = 4
# A random walk, 1.0, has no variance to compute with.
_MAX_CORRELATION = 0.97


class Answer(NamedTuple):
    """`reward` is 1 where the reward rose by more than noise, -1 where it fell, 0 else; None of too few steps."""

    learning: Learning
    reward: int | None


def answer(history: History, prompts: int | None = None, steps_left: int = 0) -> Answer:
    """The answer of a history, to which a run may still add `left` steps; held-out accuracy is of so many `prompts`."""
    rewards = finite(history, REWARD.name)
    heldout = finite(history, HELDOUT.name)
    if not rewards:
        return Answer("too short to tell", None)
    edge = edge_steps(len(rewards))
    fell = rose = False
    if len(heldout) > 1:
        fell = heldout[-1] < heldout[0]
        rose = prompts is not None and heldout[-1] - heldout[0] > NOISE * _accuracy_error(heldout, prompts)
    moved = _direction(rewards, edge) if len(rewards) >= FEWEST_VALUES else None
    if moved == 1:
        return Answer("learned its prompts alone" if fell else "learned", moved)
    if moved == -1:
        return Answer("got worse", moved)
    if rose:
        return Answer("learned", moved)
    return Answer("too short to tell" if steps_left or edge < EDGE_STEPS else "not learned", moved)


def finite(history: History, metric: str) -> list[float]:
    return [value for value in series(history, metric)[1] if math.isfinite(value)]


def _direction(values: Sequence[float], edge: int) -> int:
    """1: the mean of `edge` values rose from the start to the end by more than noise, -1: it fell, 0: neither."""
    change = fmean(values[-edge:]) - fmean(values[:edge])
    error, degrees = change_error(values, edge)
    # As rare as NOISE errors of a known size are.
    errors = float(stdtrit(degrees, NormalDist().cdf(NOISE)))
    return 0 if abs(change) <= errors * error else int(math.copysign(1, change))


def change_error(values: Sequence[float], edge: int) -> tuple[float, int]:
    """Standard error of the mean of the last `edge` values minus that of the first, and its degrees of freedom.

    The model is a quadratic plus autoregressive noise: noise[t] = phi noise[t - 1] + new[t]. (Box, Jenkins and Reinsel,
    Time Series Analysis, section 3.2.) A fit makes noise look less correlated than it is. So phi is raised by about
    (3 + 6 phi) / n (Shaman and Stine, JASA 83, 1988, for a mean). FEWEST_VALUES values at least.
    """
    count = len(values)
    basis = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, count), 3))[0]
    points = np.asarray(values, np.float64)
    noise = points - basis @ (basis.T @ points)
    power = float(noise @ noise)
    correlation = float(noise[1:] @ noise[:-1]) / power if power else 0.0
    phi = min(max((correlation + 3 / count) / (1 - 6 / count), 0.0), _MAX_CORRELATION)
    degrees = count - 1 - _MIN_FIT_POINTS
    new = noise[1:] - phi * noise[:-1]
    variance = float(new @ new) / degrees / (1 - phi**2)
    places = np.concatenate([np.arange(edge), np.arange(count - edge, count)])
    weights = np.repeat([-1 / edge, 1 / edge], edge)
    covariance = phi ** np.abs(places[:, None] - places)
    return math.sqrt(variance * float(weights @ covariance @ weights)), degrees


def _accuracy_error(heldout: Sequence[float], prompts: int) -> float:
    """At most the standard error of the change from the first to the last accuracy; infinity for other scores."""
    ends = heldout[0], heldout[-1]
    if not all(0.0 <= mean <= 1.0 for mean in ends):
        return math.inf
    return math.sqrt(sum(mean * (1.0 - mean) for mean in ends) / prompts)


def agreement(history: History, why: str | None = None) -> str:
    """The comparison of rollout and training; `why` is the reason where a run is unverifiable."""
    _, errors = series(history, TMPE.name)
    _, differing = series(history, TOKENS_DIFFERING.name)
    compared = compared_tokens(history)
    if not errors and not differing:
        return "no step measured the two policies against each other"
    if not any(differing) and all(error == 1.0 for error in errors):
        words = f"rollout and training agree bit for bit on {compared.words}"
    else:
        whole = compared.words.removeprefix("all ")
        share = f" on {short(100 * sum(differing) / compared.tokens)} % of {whole}" if compared.tokens else ""
        words = f"rollout and training differ{share}"
        if (mean := token_mean(history, TMPE.name)) is not None:
            words += f", error a token {format_tmpe(mean)} in the mean, {format_tmpe(max(errors))} at most"
    return f"{words}; unverifiable, as {why}" if any(row.get(UNVERIFIABLE.name) for row in history) else words


def token_mean(history: History, metric: str) -> float | None:
    """The mean over all compared tokens of a metric of a step; None where no step has both."""
    rows = [
        (row[metric], row[COMPARED_TOKENS.name]) for row in history if metric in row and row.get(COMPARED_TOKENS.name)
    ]
    if not rows:
        return None
    return sum(value * tokens for value, tokens in rows) / sum(tokens for _, tokens in rows)


def rollout_speed(run: RunData) -> float | None:
    """Tokens a second of rollout, over the steps of which both are known but the first, in which engines compile."""
    seconds = run.generating
    by_step = zip(*series(run.history, TOKENS.name), strict=True)
    pairs = [(count, seconds[step]) for step, count in by_step if step in seconds and step > START + 1]
    seconds_total = sum(second for _, second in pairs)
    return sum(count for count, _ in pairs) / seconds_total if seconds_total > 0 else None


class Conclusion(NamedTuple):
    """The diagnosis of a run, and paragraphs: symptom and change, the result, and what to do next without them."""

    diagnosis: Diagnosis | None
    paragraphs: list[str]

    def collapses(self, label: str) -> list[Collapse]:
        step = None if self.diagnosis is None else self.diagnosis.collapse
        return [] if step is None else [Collapse(label, step)]


def conclude(run: RunData) -> Conclusion:
    config = run.view.config
    why = unverifiable(config) if config is not None and has_evidence(config) else None
    judged = answer(run.history, None if config is None else config.evaluation.prompts, run.steps_left)
    last = [completion for examples in run.examples[-1:] for completion in examples.completions]
    text = "".join(piece.text for completion in last[:1] for piece in completion.pieces)
    cause = diagnosis(Evidence(run.history, config, judged.learning, text, run_commands(run.view)[0]))
    action = _next(run, judged.learning, cause)
    result = cause.cause if cause is not None and cause.collapse is not None else judged.learning
    return Conclusion(
        cause,
        [
            *([] if cause is None else [cause.symptom, cause.change]),
            _result(run, judged.reward, result, agreement(run.history, why)),
            *([] if action is None else [f"Next: {action}."]),
        ],
    )


def _result(run: RunData, direction: int | None, result: str, compared: str) -> str:
    _, heldout = series(run.history, HELDOUT.name)
    rewards = finite(run.history, REWARD.name)
    phrases = []
    if heldout:
        ends = dict.fromkeys([0, len(heldout) - 1])
        phrases.append(f"held-out accuracy {' to '.join(three_decimals(heldout[end]) for end in ends)}")
    if rewards:
        chance = "" if direction is None else ", beyond chance" if direction else ", within chance"
        first = three_decimals(first_steps(rewards))
        last = three_decimals(last_steps(rewards))
        phrases.append(f"reward {first} to {last}{chance}")
    speed = rollout_speed(run)
    paces = [f"{short(median(run.busy.values()))} s of tasks a step"] if run.busy else []
    paces += [f"{short(speed)} tokens a second of rollout"] if speed is not None else []
    sentences = [": ".join([result, *phrases[:1]]), *phrases[1:], compared, *([", ".join(paces)] if paces else [])]
    return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) + "."


def _next(run: RunData, learning: Learning, found: Diagnosis | None) -> str | None:
    """The one action: of what stopped the run, else the use of what it learned; None: the diagnosis has it."""
    place, resume = run_commands(run.view)
    last = max(run.view.steps, default=0)
    entries = run.view.ledger.entries
    crossing = entries[-1] if entries else None
    if isinstance(crossing, BoundEntry) and crossing.action != "warn":
        return f"find why {crossing.bound} was crossed, then {resume}"
    if found is not None:
        return None
    if run.steps_left:
        return f"{resume} trains the {count_text(run.steps_left, 'step')} left, if nothing trains it now"
    solved = finite(run.history, HELDOUT.name)[-1:] == [1.0]
    actions: dict[Learning, str] = {
        "learned": f"fp8-grpo evaluate {place} --samples 2, then fp8-grpo export {place} --step {last} FOLDER",
        "learned its prompts alone": "add training problems, or set loss.reference_kl",
        "got worse": "lower training.learning_rate",
        "not learned": "choose harder problems" if solved else "raise training.learning_rate",
        "too short to tell": f"{resume} --set steps={2 * max(last, EDGE_STEPS)} trains on",
    }
    return actions[learning]
