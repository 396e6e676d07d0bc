"""The iteration as a person reads it: an aligned table, and a Mermaid flowchart."""

import textwrap
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from fp8core.config.check import Plan, PlannedStep

_WRAP = 60


def pipeline_text(plan: Plan) -> str:
    """The steps by level with what each needs and provides; a star marks what the previous iteration hands over.

    A port that has another artifact than that of its own name is written `port=artifact`.
    """
    levels = plan.levels()
    rows: list[tuple[str, ...]] = [("level", "step", "needs", "provides")]
    for number, level in enumerate(levels):
        rows += [row for step in level for row in _rows(number, step, plan.carries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    carried = ", ".join(f"{start} (was {end})" for start, end in plan.carries.items()) or "nothing"
    together = [", ".join(step.name for step in level) for level in levels if len(level) > 1]
    notes = [
        f"* from the previous iteration: {carried}",
        f"side by side: {'; '.join(together) or 'nothing, each step waits for the one before'}",
    ]
    return "\n".join([lines[0], rule, *lines[1:], "", *notes])


def pipeline_mermaid(plan: Plan, durations: Mapping[str, float] | None = None) -> str:
    """The steps as a Mermaid flowchart: edges carry artifacts, dashed ones lead to the next iteration.

    `durations` are seconds by step, shown below its name.
    """
    seconds = durations or {}
    lines = ["flowchart LR"]
    for step in plan.steps:
        label = f"{step.name}<br/>{seconds[step.name]:.2f} s" if step.name in seconds else step.name
        lines.append(f'    {_node(step)}["{label}"]')
    lines += [f'    {_node(source)} -->|"{label}"| {_node(target)}' for source, target, label in _edges(plan)]
    lines += [f'    {_node(source)} -.->|"{label}"| {_node(target)}' for source, target, label in _carried(plan)]
    return "\n".join(lines)


def _rows(level: int, step: PlannedStep, carries: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    needs = [_connection(port, artifact) + "*" * (artifact in carries) for port, artifact in step.inputs.items()]
    provides = [_connection(port, artifact) for port, artifact in step.outputs.items()]
    return zip_longest([str(level)], [step.name], _wrapped(needs), _wrapped(provides), fillvalue="")


def _connection(port: str, artifact: str) -> str:
    return artifact if port == artifact else f"{port}={artifact}"


def _wrapped(words: list[str]) -> list[str]:
    return textwrap.wrap(", ".join(words), _WRAP, break_long_words=False) or ["-"]


def _node(step: PlannedStep) -> str:
    # A bare `end` or `graph` is a keyword of Mermaid.
    return f"step_{step.name}"


def _edges(plan: Plan) -> Iterator[tuple[PlannedStep, PlannedStep, str]]:
    for source in plan.steps:
        for target in plan.steps:
            shared = [artifact for artifact in source.outputs.values() if artifact in target.inputs.values()]
            if shared:
                yield source, target, ", ".join(shared)


def _carried(plan: Plan) -> Iterator[tuple[PlannedStep, PlannedStep, str]]:
    for start, end in plan.carries.items():
        source = next(step for step in plan.steps if end in step.outputs.values())
        for target in plan.steps:
            if start in target.inputs.values():
                yield source, target, f"{end} as {start}"
