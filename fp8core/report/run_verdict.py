"""The verdict on a training: learned or not, equal policies or by how much, its speed, and the one action to take.

Everything is computed from the history of the run. A change counts when it is larger than `NOISE` standard errors. That
of the reward is between the first and the last steps, which are correlated: the fewer the steps, the larger it has to
be. That of held-out accuracy is between the first and the last evaluation. Without a change, a run that may still learn
is too short to tell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

import numpy as np
from scipy.special import stdtrit

from fp8core.alignment.bounds import is_known, unverifiable
from fp8core.report.chart import counted, short
from fp8core.report.console import format_tmpe
from fp8core.report.diagnosis import Diagnosis, diagnose, run_commands
from fp8core.report.run_data import RunData
from fp8core.report.summary import EDGE_STEPS, Learning, compared_tokens, edge_steps, first_steps, last_steps
from fp8core.store.ledger import START, BoundEntry
from fp8core.store.metrics import (
    COMPARED,
    HELDOUT,
    REWARD,
    TMPE,
    TOKENS,
    TOKENS_DIFFERING,
    UNVERIFIABLE,
    History,
    series,
)

NOISE = 3.0
FEWEST_VALUES = 10
# Of the quadratic and of the correlation.
_FITTED = 4
# A random walk, 1.0, has no variance to compute with.
_MOST_CORRELATED = 0.97
_LARGEST_WITH_DECIMALS = 100.0


@dataclass(frozen=True)
class Answer:
    """The result of a history, and the words for it; `compared` are those about rollout and training.

    `reward` is 1 where the reward rose by more than noise, -1 where it fell, 0 for neither; None of too few steps.
    """

    learning: Learning
    reward: int | None
    compared: str
    words: str


def answer(
    history: History,
    form: Callable[[float], str],
    why: str | None = None,
    *,
    prompts: int | None = None,
    left: int = 0,
    measured: History | None = None,
) -> Answer:
    """The answer of a history, to which a run may still add `left` steps.

    `form` writes the numbers that are no error; `why` is the reason where the run is unverifiable. Without `prompts`,
    which held-out accuracy is the mean of, its noise is not known. `measured` has the rows that compare the two
    policies, where `history` is the mean of several runs.
    """
    measured = history if measured is None else measured
    learning, reasons, reward = _learning(history, form, prompts, left)
    compared = _agreement(measured, form)
    if any(row.get(UNVERIFIABLE) for row in measured):
        compared += "; unverifiable" if why is None else f"; unverifiable, as {why}"
    words = f"{learning}{f' ({reasons})' if reasons else ''}; {compared}"
    return Answer(learning, reward, compared, words[0].upper() + words[1:])


def token_mean(history: History, metric: str) -> float | None:
    """The mean over all compared tokens of a metric that is that of a step; without their number, over steps.

    None where no step has it.
    """
    rows = [row for row in history if metric in row]
    counted = [(row[metric], row[COMPARED]) for row in rows if row.get(COMPARED)]
    if counted:
        return sum(value * tokens for value, tokens in counted) / sum(tokens for _, tokens in counted)
    return fmean(row[metric] for row in rows) if rows else None


def rollout_speed(run: RunData) -> float | None:
    """Tokens a second of rollout, over the steps of which both are known but the first, in which engines compile."""
    seconds = run.generating
    steps, tokens = series(run.history, TOKENS)
    counted = zip(steps, tokens, strict=True)
    known = [(count, seconds[step]) for step, count in counted if step in seconds and step > START + 1]
    spent = sum(second for _, second in known)
    return sum(count for count, _ in known) / spent if spent > 0 else None


def _learning(
    history: History, form: Callable[[float], str], prompts: int | None, left: int
) -> tuple[Learning, str, int | None]:
    _, rewards = series(history, REWARD)
    _, heldout = series(history, HELDOUT)
    rewards, heldout = ([value for value in values if math.isfinite(value)] for values in (rewards, heldout))
    if not rewards:
        return "too short to tell", "", None
    edge = edge_steps(len(rewards))
    first, last = rewards[:edge], rewards[-edge:]
    of = f"means of the first and last {edge} steps" if edge > 1 else "the first and the last step"
    reasons = f"reward {form(fmean(first))} to {form(fmean(last))}, {of}"
    fell = rose = False
    if len(heldout) > 1:
        reasons += f"; held-out accuracy {form(heldout[0])} to {form(heldout[-1])}"
        fell = heldout[-1] < heldout[0]
        rose = prompts is not None and heldout[-1] - heldout[0] > NOISE * _accuracy_error(heldout, prompts)
    moved = _direction(rewards, edge) if len(rewards) >= FEWEST_VALUES else None
    if moved == 1:
        return ("learned its prompts alone" if fell else "learned"), reasons, moved
    if moved == -1:
        return "got worse", reasons, moved
    if moved == 0:
        reasons += "; the reward changed by no more than chance"
    if rose:
        return "learned", f"{reasons}; held-out accuracy rose by more than chance", moved
    return ("too short to tell" if left or edge < EDGE_STEPS else "not learned"), reasons, moved


def _direction(values: Sequence[float], edge: int) -> int:
    """1: the mean of `edge` values rose from the start to the end by more than noise, -1: it fell, 0: neither."""
    change = fmean(values[-edge:]) - fmean(values[:edge])
    error, degrees = change_error(values, edge)
    # As rare as NOISE errors of a known size are.
    errors = float(stdtrit(degrees, NormalDist().cdf(NOISE)))
    return 0 if abs(change) <= errors * error else int(math.copysign(1, change))


def change_error(values: Sequence[float], edge: int) -> tuple[float, int]:
    """Standard error of the mean of the last `edge` values minus that of the first, and its degrees of freedom.

    The model is a quadratic in the place plus autoregressive noise: noise[t] = phi noise[t - 1] + new[t]. (Box, Jenkins
    and Reinsel, Time Series Analysis, section 3.2.) A fit makes noise look less correlated than it is. So phi is
    raised by about (3 + 6 phi) / n (Shaman and Stine, JASA 83, 1988, for a mean). FEWEST_VALUES values at least.
    """
    count = len(values)
    assert count >= FEWEST_VALUES, "the fit leaves some degrees of freedom"
    basis = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, count), 3))[0]
    series = np.asarray(values, np.float64)
    noise = series - basis @ (basis.T @ series)
    power = float(noise @ noise)
    found = float(noise[1:] @ noise[:-1]) / power if power else 0.0
    phi = min(max((found + 3 / count) / (1 - 6 / count), 0.0), _MOST_CORRELATED)
    degrees = count - 1 - _FITTED
    new = noise[1:] - phi * noise[:-1]
    variance = float(new @ new) / degrees / (1 - phi**2)
    places = np.concatenate([np.arange(edge), np.arange(count - edge, count)])
    weights = np.repeat([-1 / edge, 1 / edge], edge)
    correlated = phi ** np.abs(places[:, None] - places)
    return math.sqrt(variance * float(weights @ correlated @ weights)), degrees


def _accuracy_error(heldout: Sequence[float], prompts: int) -> float:
    """The standard error of the change from the first to the last accuracy, if either had other prompts.

    Both have the same prompts, so the real one is smaller, also where scores are not 0 or 1 alone. Of means of scores
    outside [0, 1] it is not known: infinity.
    """
    ends = heldout[0], heldout[-1]
    if not all(0.0 <= mean <= 1.0 for mean in ends):
        return math.inf
    return math.sqrt(sum(mean * (1.0 - mean) for mean in ends) / prompts)


def _agreement(history: History, form: Callable[[float], str]) -> str:
    _, errors = series(history, TMPE)
    _, differing = series(history, TOKENS_DIFFERING)
    compared = compared_tokens(history)
    if not errors and not differing:
        return "no step measured the two policies against each other"
    if not any(differing) and all(error == 1.0 for error in errors):
        return f"rollout and training agree bit for bit on {compared.words}"
    whole = compared.words.removeprefix("all ")
    share = f"on {form(100 * sum(differing) / compared.tokens)} % of {whole}" if differing and compared.tokens else ""
    found = [f"rollout and training differ {share}".strip()]
    if (mean := token_mean(history, TMPE)) is not None:
        found.append(f"error a token {format_tmpe(mean)} in the mean, {format_tmpe(max(errors))} at most")
    return ", ".join(found)


def head(run: RunData) -> list[str]:
    """Paragraphs: the diagnosis, the result, and what to do next where the diagnosis does not say it."""
    config = run.view.config
    why = unverifiable(config) if config is not None and is_known(config) else None
    prompts = None if config is None else config.evaluation.prompts
    judged = answer(run.history, short, why, prompts=prompts, left=run.left)
    diagnosis = diagnose(run.view, run.history, judged.learning, run.left)
    action = _next(run, judged.learning, diagnosis)
    verdict = diagnosis.cause if diagnosis is not None and diagnosis.step is not None else judged.learning
    return [
        *([] if diagnosis is None else [diagnosis.sentence]),
        _result(run, judged, verdict),
        *([] if action is None else [f"Next: {action}."]),
    ]


def mismatch(run: RunData) -> str | None:
    """The number of steps in which both policies were bit-equal; None where none was measured or equal."""
    measured = [row for row in run.history if TMPE in row]
    equal = sum(row[TMPE] == 1.0 and not row.get(TOKENS_DIFFERING) for row in measured)
    if not equal:
        return None
    count = f"all {equal}" if equal == len(measured) else f"{equal} of {len(measured)}"
    steps = "the only step" if len(measured) == 1 else f"{count} steps"
    return f"The mismatch is zero in {steps}, on {compared_tokens(run.history).words}."


def _result(run: RunData, judged: Answer, verdict: str) -> str:
    """Verdict, accuracy and reward, comparison and speed in sentences; what was not measured is left out."""
    _, heldout = series(run.history, HELDOUT)
    rewards = [value for value in series(run.history, REWARD)[1] if math.isfinite(value)]
    learned = []
    if heldout:
        ends = dict.fromkeys([0, len(heldout) - 1])
        learned.append(f"held-out accuracy {' to '.join(three_decimals(heldout[end]) for end in ends)}")
    if rewards:
        chance = "" if judged.reward is None else ", beyond chance" if judged.reward else ", within chance"
        ends_of_reward = three_decimals(first_steps(rewards)), three_decimals(last_steps(rewards))
        learned.append(f"reward {' to '.join(ends_of_reward)}{chance}")
    speed = rollout_speed(run)
    paces = [f"{short(median(run.busy.values()))} s of tasks a step"] if run.busy else []
    paces += [f"{short(speed)} tokens a second of rollout"] if speed is not None else []
    first = ": ".join([verdict, *learned[:1]])
    sentences = [first, *learned[1:], judged.compared, *([", ".join(paces)] if paces else [])]
    return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) + "."


def three_decimals(value: float) -> str:
    """A reward or an accuracy: three decimals, and fewer of a large one."""
    return f"{value:.3f}" if abs(value) < _LARGEST_WITH_DECIMALS else short(value)


def _next(run: RunData, learning: Learning, diagnosis: Diagnosis | None) -> str | None:
    """The one action: of what stopped the run, else the use of what it learned; None: the diagnosis has it."""
    place, resume = run_commands(run.view)
    last = max(run.view.steps, default=0)
    entries: Sequence[object] = [entry for _, entry in run.view.entries]
    if entries and isinstance(crossed := entries[-1], BoundEntry) and crossed.action != "warn":
        return f"find why {crossed.bound} was crossed (fp8-grpo bisect {place}), then {resume}"
    if diagnosis is not None:
        return None
    if run.left:
        return f"{resume} trains the {counted(run.left, 'step')} left, if nothing trains it now"
    match learning:
        case "learned":
            return f"fp8-grpo evaluate {place} --samples 2, then fp8-grpo export {place} --step {last} FOLDER"
        case "learned its prompts alone":
            return "add training problems, or set loss.reference_kl"
        case "got worse":
            return "lower training.learning_rate"
        case "not learned":
            return "raise training.learning_rate"
        case "too short to tell":
            return None
