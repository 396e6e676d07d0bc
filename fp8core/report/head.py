"""The head of a report: its diagnosis, what came of the run, and the one action that follows.

The verdicts are those of `run_verdict`; here are the sentences about them.
"""

import math
from collections.abc import Sequence
from statistics import median

from fp8core.alignment.bounds import is_known, unverifiable
from fp8core.config.run import resume_command, shown_place
from fp8core.report.chart import counted, short
from fp8core.report.diagnosis import Diagnosis, diagnose
from fp8core.report.run_data import RunData
from fp8core.report.run_verdict import Answer, Learning, answer, rollout_speed
from fp8core.report.summary import compared_tokens, first_steps, last_steps
from fp8core.store.ledger import BoundEntry
from fp8core.store.metrics import HELDOUT, REWARD, TMPE, TOKENS_DIFFERING, History, series

_LARGEST_WITH_DECIMALS = 100.0


def head(run: RunData) -> list[str]:
    """Paragraphs: the diagnosis, the result, and what to do next where the diagnosis does not say it."""
    judged = _judged(run)
    diagnosis = diagnose(run.view, run.history, judged.learning, run.left)
    told = [] if diagnosis is None else [diagnosis.sentence]
    action = _next(run, judged.learning, diagnosis)
    verdict = diagnosis.cause if diagnosis is not None and diagnosis.step is not None else judged.learning
    return [*told, _result(run, judged, verdict), *([] if action is None else [f"Next: {action}."])]


def mismatch(run: RunData) -> str | None:
    """The number of steps in which both policies were bit-equal; None where none was measured or equal."""
    measured = [row for row in run.history if TMPE in row]
    equal = sum(row[TMPE] == 1.0 and not row.get(TOKENS_DIFFERING) for row in measured)
    if not equal:
        return None
    count = f"all {equal}" if equal == len(measured) else f"{equal} of {len(measured)}"
    steps = "the only step" if len(measured) == 1 else f"{count} steps"
    return f"The mismatch is zero in {steps}, on {compared_tokens(run.history).words}."


def _judged(run: RunData) -> Answer:
    config = run.view.config
    why = unverifiable(config) if config is not None and is_known(config) else None
    prompts = None if config is None else config.evaluation.prompts
    return answer(run.history, short, why, prompts=prompts, left=run.left)


def _result(run: RunData, judged: Answer, verdict: str) -> str:
    verdict = verdict[0].upper() + verdict[1:]
    accuracy, reward = _heldout(run.history), _reward(run.history, judged)
    sentences = [f"{verdict}: {accuracy or reward}" if accuracy or reward else verdict]
    if accuracy and reward:
        sentences.append(reward[0].upper() + reward[1:])
    sentences.append(judged.compared[0].upper() + judged.compared[1:])
    speed = rollout_speed(run)
    paces = [f"{short(median(run.busy.values()))} s of tasks a step"] if run.busy else []
    paces += [f"{short(speed)} tokens a second of rollout"] if speed is not None else []
    return ". ".join([*sentences, *([", ".join(paces)] if paces else [])]) + "."


def _heldout(history: History) -> str:
    _, values = series(history, HELDOUT)
    if not values:
        return ""
    return f"held-out accuracy {_from_to(values[0], values[-1]) if len(values) > 1 else three(values[0])}"


def _reward(history: History, judged: Answer) -> str:
    values = [value for value in series(history, REWARD)[1] if math.isfinite(value)]
    if not values:
        return ""
    chance = "" if judged.reward is None else ", beyond chance" if judged.reward else ", within chance"
    return f"reward {_from_to(first_steps(values), last_steps(values))}{chance}"


def _from_to(first: float, last: float) -> str:
    return f"{three(first)} to {three(last)}"


def three(value: float) -> str:
    """A reward or an accuracy: three decimals, and fewer of a large one."""
    return f"{value:.3f}" if abs(value) < _LARGEST_WITH_DECIMALS else short(value)


def _next(run: RunData, learning: Learning, diagnosis: Diagnosis | None) -> str | None:
    """The one action: of what stopped the run, else the use of what it learned; None: the diagnosis has it."""
    place, last = _place(run), max(run.view.steps, default=0)
    entries: Sequence[object] = [entry for _, entry in run.view.entries]
    if entries and isinstance(crossed := entries[-1], BoundEntry) and crossed.action != "warn":
        return f"find why {crossed.bound} was crossed (fp8-grpo bisect {place}), then {_resume(run)}"
    if diagnosis is not None:
        return None
    if run.left:
        return f"{_resume(run)} trains the {counted(run.left, 'step')} left, if nothing trains it now"
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


def _place(run: RunData) -> str:
    config, name = run.view.config, run.view.folder.name
    return name if config is None else shown_place(config, name)


def _resume(run: RunData) -> str:
    config = run.view.config
    return f"fp8-grpo resume {_place(run)}" if config is None else resume_command(config, run.view.folder.name)
