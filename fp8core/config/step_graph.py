"""The graph of one iteration: an edge is an artifact, from the step that provides it to each step that needs it."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import get_args

from pydantic import BaseModel, ValidationError

from fp8core.config.pipeline import PipelineConfig, StepConfig
from fp8core.config.section import refusal, suggestion
from fp8core.config.steps import Feature, StepSpec
from fp8core.errors import UserError


@dataclass(frozen=True)
class PlannedStep:
    """`spec`: with the ports of this configuration; `inputs` and `outputs` map a port to its artifact."""

    name: str
    uses: str
    spec: StepSpec
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    options: BaseModel


@dataclass(frozen=True)
class StepGraph:
    """Steps in an order in which inputs come before their readers."""

    steps: tuple[PlannedStep, ...]
    carries: Mapping[str, str]

    def ready(self, finished_names: set[str]) -> list[PlannedStep]:
        """Steps, not in `finished_names`, that need only what those provide and what is carried."""
        available = set(self.carries).union(
            *(step.outputs.values() for step in self.steps if step.name in finished_names)
        )
        return [
            step
            for step in self.steps
            if step.name not in finished_names and available.issuperset(step.inputs.values())
        ]

    def artifact_of(self, port: str) -> str:
        """The artifact of the first step that has an output port of this name."""
        return next(step.outputs[port] for step in self.steps if port in step.outputs)

    def levels(self) -> list[list[PlannedStep]]:
        """Steps by the earliest moment at which they can start."""
        finished_names: set[str] = set()
        levels: list[list[PlannedStep]] = []
        while level := self.ready(finished_names):
            levels.append(level)
            finished_names |= {step.name for step in level}
        return levels


def check_pipeline(
    pipeline: PipelineConfig,
    carried_kinds: Mapping[str, str],
    resolve: Callable[[str], StepSpec],
    features: Collection[Feature] = (),
) -> StepGraph:
    """The graph of a configuration with these features; the only place where they decide about steps and ports.

    `carried_kinds`: of artifacts before the first iteration. Raises UserError, with the place and the reason.
    """
    names = [step.name for step in pipeline.steps]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"step {duplicates[0]}: two steps have this name")
    present = {step.name: step for step in pipeline.steps if step.when is None or step.when in features}
    steps = [_connect(step, resolve, features) for step in present.values()]
    handed_over = {start: step.outputs[port] for step in steps for start, port in step.spec.carries.items()}
    carries = {**pipeline.carries, **handed_over}
    producers = _producers(steps, carries)
    kinds = {artifact: step.spec.outputs[port] for step in steps for port, artifact in step.outputs.items()}
    _check_carries(carries, carried_kinds, kinds)
    kinds |= {artifact: carried_kinds[artifact] for artifact in carries}
    steps = [_connect_optional(step, present[step.name].inputs(), kinds) for step in steps]
    for step in steps:
        _check_inputs(step, kinds)
    return StepGraph(tuple(_in_order(steps, producers)), carries)


def _connect(step: StepConfig, resolve: Callable[[str], StepSpec], features: Collection[Feature]) -> PlannedStep:
    try:
        function = resolve(step.uses)
    except UserError as error:
        raise UserError(f"step {step.name}: {error}") from error
    every = function.under(get_args(Feature))
    spec = function.under(features)
    needs = step.inputs()
    _check_port_names(step.name, "input", needs, every.input_kinds)
    _check_port_names(step.name, "output", step.provides, every.outputs)
    by_name = {port: port for port in spec.inputs if port not in function.inputs}
    artifacts = {port: artifact for port, artifact in {**by_name, **needs}.items() if port in spec.input_kinds}
    inputs = {port: artifact for port, artifact in artifacts.items() if artifact is not None}
    missing = [port for port in spec.inputs if port not in inputs]
    if missing:
        raise UserError(f"step {step.name}: needs does not name the required input {missing[0]}")
    outputs = {port: step.provides.get(port, port) for port in spec.outputs}
    return PlannedStep(step.name, step.uses, spec, inputs, outputs, _options(step, spec))


def _connect_optional(step: PlannedStep, needs: Collection[str], kinds: Mapping[str, str]) -> PlannedStep:
    """With each optional input that `needs` does not mention, where another step provides what it is named after."""
    free = {port: kind for port, kind in step.spec.optional_inputs.items() if port not in needs}
    own = step.outputs.values()
    ports = {port: port for port, kind in free.items() if kinds.get(port) == kind and port not in own}
    return replace(step, inputs={**step.inputs, **ports})


def _check_port_names(step: str, direction: str, ports: Iterable[str], spec_ports: Mapping[str, str]) -> None:
    for port in ports:
        if port not in spec_ports:
            raise UserError(f"step {step}: it has no {direction} port {port}; {suggestion(port, spec_ports)}")


def _options(step: StepConfig, spec: StepSpec) -> BaseModel:
    try:
        return spec.options.model_validate_json(json.dumps(step.options), strict=True)
    except ValidationError as error:
        raise refusal(error, spec.options, step.options, prefix=f"pipeline.steps.{step.name}.with") from error


def _producers(steps: Sequence[PlannedStep], carries: Mapping[str, str]) -> dict[str, PlannedStep]:
    producers: dict[str, PlannedStep] = {}
    for step in steps:
        for port, artifact in step.outputs.items():
            if not artifact.isidentifier():
                raise UserError(f"step {step.name}: output {port}: {artifact!r} is not a name for an artifact")
            if artifact in carries:
                raise UserError(f"step {step.name}: provides {artifact}, which the previous iteration hands over")
            if artifact in producers:
                first = producers[artifact].name
                raise UserError(f"artifact {artifact}: provided by two steps, {first} and {step.name}")
            producers[artifact] = step
    return producers


def _check_carries(carries: Mapping[str, str], carried_kinds: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    for start, end in carries.items():
        place = f"pipeline.carries.{start}"
        if start not in carried_kinds:
            raise UserError(
                f"{place}: nothing of this name exists before the first iteration; {suggestion(start, carried_kinds)}"
            )
        if end not in kinds:
            raise UserError(f"{place}: no step provides {end}; {suggestion(end, kinds)}")
        if kinds[end] != carried_kinds[start]:
            raise UserError(f"{place}: wants kind {carried_kinds[start]}, but artifact {end} is of kind {kinds[end]}")


def _check_inputs(step: PlannedStep, kinds: Mapping[str, str]) -> None:
    for port, artifact in step.inputs.items():
        place = f"step {step.name}: input {port}"
        kind = step.spec.input_kinds[port]
        if artifact not in kinds:
            raise UserError(f"{place}: there is no artifact {artifact}; {suggestion(artifact, kinds)}")
        if kinds[artifact] != kind:
            raise UserError(f"{place} wants kind {kind}, but artifact {artifact} is of kind {kinds[artifact]}")


def _in_order(steps: Sequence[PlannedStep], producers: Mapping[str, PlannedStep]) -> list[PlannedStep]:
    """In topological order; of those that could come next, the first one in the configuration does."""
    needs = {
        step.name: {producers[artifact].name for artifact in step.inputs.values() if artifact in producers}
        for step in steps
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise UserError(f"pipeline: cycle {' -> '.join(error.args[1])}") from None
    order: dict[str, PlannedStep] = {}
    while len(order) < len(steps):
        free = next(step for step in steps if step.name not in order and needs[step.name] <= order.keys())
        order[free.name] = free
    return list(order.values())
