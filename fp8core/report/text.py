"""Bisections, plans, pipelines, evaluations and progress as aligned text."""

from collections.abc import Iterator, Sequence
from itertools import chain

from fp8core.config.step_graph import StepGraph
from fp8core.errors import printable_lines
from fp8core.evaluation.measure import Estimate, EvaluationResult, PartCosts
from fp8core.plan.run_plan import RunPlan
from fp8core.report.chart import MISSING
from fp8core.resources.memory import CacheRoom, DevicePlan, Phase


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; rows are equally long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def evaluation_text(result: EvaluationResult) -> str:
    """The request, then a line for each precision and for its difference from the first."""
    of = result.target if result.step is None else f"{result.target}, step {result.step}"
    sampling = "greedy" if result.temperature == 0 else f"{result.samples} at temperature {result.temperature:g}"
    request = f"{of}: {result.prompts} prompts of {result.data}, {sampling}; 95% intervals"
    tables = [["", *columns(rows)] for rows in _evaluation_rows(result)]
    return printable_lines("\n".join([request, *chain.from_iterable(tables)]))


def _evaluation_rows(result: EvaluationResult) -> list[list[Sequence[str]]]:
    first = next(iter(result.precisions))
    names = list(result.precisions[first].estimates)
    logprobs = {name: [f"{value:.3f}"] for name, value in result.answer_logprobs.items()}
    estimates = [
        ("precision", *names),
        *(
            (name, *_cells(estimates, names, ""))
            for precision, measurement in result.precisions.items()
            for name, estimates in (
                (precision, measurement.estimates),
                *((f"{precision}, {source}", by) for source, by in measurement.sources.items()),
            )
        ),
        *((f"{name} - {first}", *_cells(by, names, "+")) for name, by in result.differences.items()),
    ]
    outcomes = [
        ("precision", *result.precisions[first].outcomes, "tokens", *(["log p of answers"] * bool(logprobs))),
        *(
            (name, *map(str, measurement.outcomes.values()), f"{measurement.length_mean:.1f}", *logprobs.get(name, []))
            for name, measurement in result.precisions.items()
        ),
    ]
    return [[*estimates], [*outcomes], *(_part_rows(name, costs) for name, costs in result.parts.items())]


def _part_rows(precision: str, costs: PartCosts) -> list[Sequence[str]]:
    """KL from BF16 in nats a token, and log-probabilities of the right answer in BF16 and their shifts."""
    last = MISSING if costs.answer_logprob is None else f"{costs.answer_logprob:.3f}"
    return [
        (f"{precision} from BF16", "KL", "median", "worst text", "same choice", "KL of answers", "log p of answers"),
        ("BF16", "0", "0", "0", "1", "0", last),
        *(
            (
                part,
                *(f"{value:.4f}" for value in (cost.nats, cost.median, cost.worst, cost.same_choice)),
                MISSING if cost.answer_nats is None else f"{cost.answer_nats:.4f}",
                MISSING if cost.answer_shift is None else f"{cost.answer_shift:+.3f}",
            )
            for part, cost in costs.parts.items()
        ),
    ]


def _cells(estimates: dict[str, Estimate], names: Sequence[str], sign: str) -> list[str]:
    return [
        f"{estimate.value:{sign}.4f} [{estimate.low:{sign}.4f}, {estimate.high:{sign}.4f}]"
        for estimate in (estimates[name] for name in names)
    ]


_ITEM = 38
_SIZE = 9
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def plan_text(plan: RunPlan) -> str:
    """A table for each phase of each device, then what the cache holds, a sync sends and checkpoints take."""
    counts = plan.parameters
    active = f", {_number(counts.active)} for a token" if counts.active < counts.total else ""
    parts = f"{_number(counts.linear)} in linears, {_number(counts.head)} in the head"
    lines = [f"model  {_number(counts.total)} parameters{active}: {parts}", ""]
    for device in plan.devices:
        for phase in device.phases:
            lines += [*_phase(device, phase), ""]
    if plan.cache is not None:
        lines.append(f"cache  {_cache(plan.cache)}")
    sync = plan.sync
    space = plan.checkpoint
    lines.append(
        f"sync   {sync.total:,} bytes: {sync.codes:,} FP8 codes, {sync.scales:,} scales, {sync.kept:,} in other formats"
    )
    steps = "step" if space.every == 1 else f"{space.every} steps"
    retention = f"the last {space.kept} are kept"
    lines.append(f"disk   {with_unit(space.bytes)} a checkpoint, one every {steps}; {retention}")
    return "\n".join(lines)


def _phase(device: DevicePlan, phase: Phase) -> Iterator[str]:
    unit = next((unit for unit, size in _UNITS.items() if phase.total >= size), "KiB")
    yield f"{f'{phase.name} on {device.name}':<{_ITEM + 2}}{unit:>{_SIZE}}"
    for need in phase.needs:
        yield f"  {need.item:<{_ITEM}}{_size(need.bytes, unit)}  {need.note}".rstrip()
    fits = "of" if phase.fits else "does not fit:"
    limit = "" if phase.limit is None else f"{fits} {_size(phase.limit, unit).strip()}"
    yield f"  {'total':<{_ITEM}}{_size(phase.total, unit)}  {limit}".rstrip()


def _size(size: int, unit: str) -> str:
    return f"{size / _UNITS[unit]:>{_SIZE},.1f}"


def with_unit(size: int) -> str:
    """Bytes in the largest unit that gives one or more, such as `1.5 GiB`."""
    unit = next((unit for unit, bytes_ in _UNITS.items() if size >= bytes_), "KiB")
    return f"{_size(size, unit).strip()} {unit}"


def _number(count: int) -> str:
    return f"{count / 1e9:.3f} G" if count >= 10**8 else f"{count:,}"


def _cache(room: CacheRoom) -> str:
    engines = "" if room.engines == 1 else f" in each of {room.engines} engines"
    return f"{room.tokens:,} tokens{engines}: {room.sequences:,} sequences of {room.sequence:,}, {room.wanted:,} wanted"


def pipeline_text(graph: StepGraph) -> str:
    """The steps by level with what each needs and provides; a star marks what the previous iteration hands over.

    A port that has another artifact than that of its own name is written `port=artifact`.
    """
    levels = graph.levels()
    rows = [("level", "step", "needs", "provides")]
    for number, level in enumerate(levels):
        for step in level:
            needs = [_connection(port, name) + "*" * (name in graph.carries) for port, name in step.inputs.items()]
            provides = [_connection(port, name) for port, name in step.outputs.items()]
            rows.append((str(number), step.name, ", ".join(needs) or MISSING, ", ".join(provides) or MISSING))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    carries = ", ".join(f"{start} (was {end})" for start, end in graph.carries.items()) or "nothing"
    together = [", ".join(step.name for step in level) for level in levels if len(level) > 1]
    notes = [
        f"* from the previous iteration: {carries}",
        f"side by side: {'; '.join(together) or 'nothing, each step waits for the one before'}",
    ]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", *notes])


def _connection(port: str, artifact: str) -> str:
    return artifact if port == artifact else f"{port}={artifact}"
