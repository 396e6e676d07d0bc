"""The declaration of one iteration: its steps, what each needs, provides and accepts as options, and their graph.

An artifact has one name and one producer in an iteration. `needs` and `provides` map a step's ports to artifact names;
a port that is not mentioned has the artifact of its own name.

There is no registry of steps. A step is any callable with an attribute `spec`, found by its import path
(`uses: package.module:name`). So a step of the user's own needs no call into this library.
`check_pipeline` connects the steps before any work, and refuses those that cannot run.
"""

import importlib
import itertools
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field, ValidationError

from fp8core.config.section import Section, refusal, suggestion
from fp8core.errors import UserError, described_error


class StepConfig(Section):
    """One step of the iteration."""

    name: str = Field(
        min_length=1, max_length=60, pattern=r"^[a-z][a-z0-9_]*$", description="Name of the step in the pipeline."
    )
    uses: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="Import path of the step: `tasks.rollout:rollout`."
    )
    needs: dict[str, str] | list[str] = Field(
        default_factory=list, description="Input ports: a list of artifact names, or port -> artifact."
    )
    provides: dict[str, str] = Field(default_factory=dict, description="Output port -> artifact, to rename an output.")
    options: dict[str, Any] = Field(default_factory=dict, alias="with", description="Options of this step.")

    def inputs(self) -> dict[str, str]:
        """Input ports and the artifacts they read."""
        return dict(self.needs) if isinstance(self.needs, dict) else {name: name for name in self.needs}


class PipelineConfig(Section):
    """The steps of one iteration, what one iteration hands to the next, and whether generation waits for the update."""

    mode: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        "synchronous",
        description="`one_step_off` generates the completions of the next step beside the update. `asynchronous` goes "
        "on with what is in flight under the next policy.",
    )
    max_staleness: int = Field(
        1, ge=0, le=100, description="Versions that a token may be older than the policy that learns from it."
    )
    ahead_tokens: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="With `asynchronous`: tokens one after the other beside an update; 0: none, and engines may sleep; "
        "null: until the update has ended, and how many these were is recorded.",
    )
    chunk_tokens: int = Field(
        32,
        ge=1,
        le=1 << 20,
        description="With `asynchronous`: tokens that completions write before the next prompts enter, and before the "
        "update is looked at; of an episode at most to the end of its turn.",
    )
    max_inflight_prompts: int | None = Field(
        None, ge=1, le=1 << 20, description="Prompts that are answered at a time; null: all that staleness allows."
    )
    drop_or_wait: Literal["wait", "drop"] = Field(
        "wait",
        description="`wait`: a step learns from its own prompts. `drop`: from those that are complete first, and those "
        "that get older than `max_staleness` are evicted; needs `asynchronous`.",
    )
    in_flight_weight_updates: bool = Field(
        True,
        description="false: with `asynchronous`, completions that have begun end before engines take new weights, so "
        "that each is of one version.",
    )
    recompute_kv_cache_after_weight_update: bool = Field(
        True,
        description="false: the embedded engine keeps the cache of tokens that older weights wrote. No pass gives "
        "their log-probs then, and the run is `unverifiable`.",
    )
    verified_share: float = Field(
        0.0625,
        gt=0,
        le=1,
        description="Share of the completions, drawn from the seed, whose log-probs are computed again with the "
        "weights of the version that wrote each token.",
    )
    steps: list[StepConfig] = Field(min_length=1, description="Steps of an iteration, or changes of steps by name.")
    carries: dict[str, str] = Field(
        default_factory=lambda: {"policy": "next_policy", "scales": "next_scales"},
        description="Artifact at the start of an iteration -> artifact that replaces it at the end.",
    )

    @property
    def in_turn(self) -> bool:
        """True where nothing is generated while the policy learns."""
        return self.mode == "synchronous" or self.ahead_tokens == 0

    @property
    def kept_policies(self) -> int:
        """Policies that are kept to score the tokens that they wrote: the newest, and those that a step learns from."""
        return 0 if self.mode == "synchronous" else self.max_staleness + 2

    @property
    def reach(self) -> int:
        """Updates before the newest policy from which a resumed run may need a policy to score tokens with."""
        return max(0, self.kept_policies - 1)


_PROMPTS = "tasks.prompts:prompts"
_ROLLOUT = "tasks.rollout:rollout"
_EPISODES = "tasks.rollout:episodes"
_FINISH = "tasks.stream:finish"
_FINISH_EPISODES = "tasks.stream:finish_episodes"
_AHEAD = "tasks.stream:ahead"
_PASS = "tasks.logprobs:logprobs"
_UPDATE = "tasks.train:train"
_SCORING_UPDATE = "tasks.train:train_scoring"
_SYNC = "tasks.sync:sync"
UPDATES = (_UPDATE, _SCORING_UPDATE)
REFERENCE = "tasks.reference:reference"
TEACHER = "tasks.teacher:teacher"
FILTER = "tasks.filter:filter"
RECORD = "tasks.record:record"


def _refuse_unfollowed(pipeline: PipelineConfig) -> None:
    """Refuse settings that `pipeline.mode` would not follow."""
    if pipeline.mode == "asynchronous":
        return
    refused = {
        "drop_or_wait=drop": pipeline.drop_or_wait == "drop",
        "recompute_kv_cache_after_weight_update=false": not pipeline.recompute_kv_cache_after_weight_update,
        "in_flight_weight_updates=false": not pipeline.in_flight_weight_updates,
        f"ahead_tokens={pipeline.ahead_tokens}": pipeline.ahead_tokens is not None,
        f"max_staleness={pipeline.max_staleness}": pipeline.max_staleness > 1,
    }
    for setting in (setting for setting, found in refused.items() if found):
        raise ValueError(f"pipeline.{setting}: needs pipeline.mode=asynchronous, not {pipeline.mode}")


def with_mode(pipeline: PipelineConfig) -> PipelineConfig:
    """The steps as `pipeline.mode` has them: two steps over the stream of completions replace prompts and rollout.

    Raises:
        ValueError: the steps do not fit the mode.
    """
    _refuse_unfollowed(pipeline)
    if pipeline.mode == "synchronous" or any(step.uses in (_FINISH, _FINISH_EPISODES) for step in pipeline.steps):
        return pipeline
    found = {uses: [step for step in pipeline.steps if step.uses == uses] for uses in (_PROMPTS, _ROLLOUT)}
    if [len(steps) for steps in found.values()] != [1, 1]:
        raise ValueError(f"pipeline.mode={pipeline.mode}: replaces one step {_PROMPTS} and one step {_ROLLOUT}")
    (prompts,), (rollout,) = found.values()
    both = {port: rollout.inputs()[port] for port in ("policy", "scales")}
    provides = prompts.provides | rollout.provides
    finish = StepConfig(name=rollout.name, uses=_FINISH, needs={"stream": "stream", **both}, provides=provides)
    ahead = StepConfig(name="ahead", uses=_AHEAD, needs={"left": "left", **both})
    learnt = next((step.inputs().get("rewards") for step in pipeline.steps if step.uses in UPDATES), None)
    steps = list[StepConfig]()
    for step in pipeline.steps:
        if step is prompts:
            continue
        if step.uses == _SYNC:
            # Generation must have ended, and it runs beside everything before. In a process that runs one step at a
            # time the update has then ended, too.
            steps.append(ahead)
            step = step.model_copy(update={"needs": step.inputs() | {"next_stream": "next_stream"}})
        if step.uses == RECORD:
            added = {name: name for name in ("behaviour", "schedule", "evictions", "left", "next_stream")}
            # Metrics by age are of the rows that the update looks at, which a filter may have chosen.
            if learnt is not None and learnt != step.inputs().get("rewards"):
                added["learnt"] = learnt
            step = step.model_copy(update={"needs": step.inputs() | added})
        steps.append(finish if step is rollout else step)
    if ahead not in steps:
        steps.append(ahead)
    carries = pipeline.carries | {"stream": "next_stream"}
    return pipeline.model_copy(update={"steps": steps, "carries": carries})


def with_source(pipeline: PipelineConfig, source: str) -> PipelineConfig:
    """The steps as `logprobs.source` has them: `pass` leaves them, else one step is both the pass and the update.

    Raises:
        ValueError: the steps do not fit the source.
    """
    found = {uses: [step for step in pipeline.steps if step.uses == uses] for uses in (_PASS, _UPDATE, _SCORING_UPDATE)}
    scoring, updates, joined = found.values()
    if source == "pass":
        if joined:
            raise ValueError(f"step {joined[0].name}: {_SCORING_UPDATE} needs logprobs.source=training or rollout")
        return pipeline
    place = f"logprobs.source={source}"
    if not scoring and not updates and len(joined) == 1:
        return pipeline
    if joined or len(scoring) != 1 or len(updates) != 1:
        raise ValueError(
            f"{place}: replaces one step {_PASS} and one step {_UPDATE} by {_SCORING_UPDATE}, and pipeline.steps has "
            f"{len(scoring)}, {len(updates)} and {len(joined)} of these"
        )
    update, before = updates[0], scoring[0]
    ports = update.inputs() | {"logprobs": update.inputs().get("logprobs")}
    for port, artifact in {**before.inputs(), "logprobs": before.provides.get("logprobs", "logprobs")}.items():
        if ports.get(port) != artifact:
            raise ValueError(
                f"{place}: step {update.name} has {ports.get(port)} for {port}, step {before.name} has {artifact}"
            )
    step = update.model_copy(
        update={
            "uses": _SCORING_UPDATE,
            "needs": {port: artifact for port, artifact in update.inputs().items() if port != "logprobs"},
            "provides": before.provides | update.provides,
        }
    )
    steps = [step if each is update else each for each in pipeline.steps if each is not before]
    return pipeline.model_copy(update={"steps": steps})


_EVALUATE, _EVALUATE_EPISODES = "tasks.evaluate:evaluate", "tasks.evaluate:evaluate_episodes"
_READ_TURNS = ("tasks.reward:reward", FILTER, *UPDATES, RECORD)


def with_episodes(pipeline: PipelineConfig) -> PipelineConfig:
    """The steps as `environment` has them: rollout and evaluation store turns, and whoever can read turns gets them.

    Raises:
        ValueError: there is not one step that generates.
    """
    if any(step.uses in (_EPISODES, _FINISH_EPISODES) for step in pipeline.steps):
        return pipeline
    found = [step for step in pipeline.steps if step.uses in (_ROLLOUT, _FINISH)]
    if len(found) != 1:
        raise ValueError(f"environment: replaces one step {_ROLLOUT}, and pipeline.steps has {len(found)} of these")
    turns = found[0].provides.get("turns", "turns")
    replaced = {_ROLLOUT: _EPISODES, _FINISH: _FINISH_EPISODES, _EVALUATE: _EVALUATE_EPISODES}

    def rewired(step: StepConfig) -> StepConfig:
        if step.uses in replaced:
            return step.model_copy(update={"uses": replaced[step.uses]})
        if step.uses in _READ_TURNS:
            return step.model_copy(update={"needs": {"turns": turns} | step.inputs()})
        return step

    return pipeline.model_copy(update={"steps": [rewired(step) for step in pipeline.steps]})


class NoOptions(Section):
    """The options of a step, or of a loss, that has none."""


@dataclass(frozen=True)
class StepSpec:
    """The declaration of a step.

    `inputs`, `outputs` and `optional_inputs` map a port to the kind of its artifact. A pipeline must connect every port
    of `inputs` and may connect those of `optional_inputs`. `options` is the model of `with`. A step with `redo` changes
    the live trainer: a restored run executes it again from its stored inputs and compares.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    options: type[BaseModel] = NoOptions
    redo: bool = False

    def __post_init__(self) -> None:
        both = self.inputs.keys() & self.optional_inputs.keys()
        assert not both, f"step {self.name}: ports both required and optional: {sorted(both)}"

    @property
    def input_kinds(self) -> dict[str, str]:
        """Every input port, required ones first, with its kind."""
        return {**self.inputs, **self.optional_inputs}


class Step(Protocol):
    """A callable that declares what it needs and what it provides."""

    @property
    def spec(self) -> StepSpec: ...

    __call__: Callable[..., Any]


def import_attribute(path: str, place: str) -> Any:
    """The object at an import path `package.module:name`; raises UserError, which begins with `place`."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            raise UserError(f"{place}: there is no module {missing}") from error
        raise UserError(f"{place}: {module_name} imports {missing}, which is not installed") from error
    except ImportError as error:
        raise UserError(f"{place}: {module_name} cannot be imported: {error}") from error
    except SyntaxError as error:
        raise UserError(f"{place}: {error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # Whatever a module of the user's own does when it is imported.
        raise UserError(f"{place}: {_raised_at(error)}{described_error(error)}") from error
    if not hasattr(module, attribute):
        raise UserError(f"{place}: module {module_name} has no {attribute}")
    return getattr(module, attribute)


def import_step(uses: str) -> Step:
    """The step at an import path; raises UserError when there is none."""
    step: Step = import_attribute(uses, f"uses {uses}")
    if not isinstance(getattr(step, "spec", None), StepSpec):
        raise UserError(
            f"uses {uses}: {uses.partition(':')[2]} is not a step: it has no attribute `spec` of type StepSpec"
        )
    return step


def is_shipped(path: str) -> bool:
    """True for the import path of something in this project's own steps, which anybody may import."""
    return path.startswith("tasks.") and path.partition(":")[0].count(".") == 1


def _raised_at(error: BaseException) -> str:
    """The line of a module that was being imported, `file:line: `; nothing for one that is no Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def import_spec(uses: str) -> StepSpec:
    """The declaration of the step at an import path; raises UserError when there is none."""
    return import_step(uses).spec


@dataclass(frozen=True)
class PlannedStep:
    """A step with every port connected: `inputs` and `outputs` map a port to its artifact."""

    name: str
    uses: str
    spec: StepSpec
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    options: BaseModel


@dataclass(frozen=True)
class Plan:
    """One iteration that can run: steps in an order in which inputs come before their readers."""

    steps: tuple[PlannedStep, ...]
    carries: Mapping[str, str]

    def ready(self, done: set[str]) -> list[PlannedStep]:
        """Steps, not in `done`, that need only what the steps named in `done` provide and what is carried."""
        available = set(self.carries).union(*(step.outputs.values() for step in self.steps if step.name in done))
        return [step for step in self.steps if step.name not in done and available.issuperset(step.inputs.values())]

    def artifact_of(self, port: str) -> str:
        """The artifact that the first step with an output port of this name provides there."""
        return next(step.outputs[port] for step in self.steps if port in step.outputs)

    def levels(self) -> list[list[PlannedStep]]:
        """Steps by the earliest moment at which they can start; those of one level can run side by side."""
        done: set[str] = set()
        levels: list[list[PlannedStep]] = []
        while level := self.ready(done):
            levels.append(level)
            done |= {step.name for step in level}
        return levels


def check_pipeline(
    pipeline: PipelineConfig, carried_kinds: Mapping[str, str], resolve: Callable[[str], StepSpec]
) -> Plan:
    """Connect the steps of an iteration, or raise UserError with the place and the reason.

    `carried_kinds` maps the artifacts that exist before the first iteration to their kinds; `resolve` gives
    the declaration of the step at an import path.
    """
    _refuse_repeated_names(pipeline.steps)
    steps = [_connect(step, resolve) for step in pipeline.steps]
    producers = _producers(steps, pipeline.carries)
    kinds = {artifact: step.spec.outputs[port] for step in steps for port, artifact in step.outputs.items()}
    _check_carried(pipeline.carries, carried_kinds, kinds)
    kinds |= {artifact: carried_kinds[artifact] for artifact in pipeline.carries}
    for step in steps:
        _check_inputs(step, kinds)
    return Plan(tuple(_ordered(steps, producers)), dict(pipeline.carries))


def _refuse_repeated_names(steps: Sequence[StepConfig]) -> None:
    seen: dict[str, str] = {}
    for step in steps:
        if step.name in seen:
            raise UserError(f"step {step.name}: two steps have this name ({seen[step.name]} and {step.uses})")
        seen[step.name] = step.uses


def _connect(step: StepConfig, resolve: Callable[[str], StepSpec]) -> PlannedStep:
    try:
        spec = resolve(step.uses)
    except UserError as error:
        raise UserError(f"step {step.name}: {error}") from error
    inputs = step.inputs()
    _refuse_unknown_ports(step.name, "input", inputs, spec.input_kinds)
    _refuse_unknown_ports(step.name, "output", step.provides, spec.outputs)
    missing = [port for port in spec.inputs if port not in inputs]
    if missing:
        raise UserError(f"step {step.name}: needs does not name the required input {missing[0]}")
    outputs = {port: step.provides.get(port, port) for port in spec.outputs}
    return PlannedStep(step.name, step.uses, spec, inputs, outputs, _options(step, spec))


def _refuse_unknown_ports(step: str, direction: str, ports: Iterable[str], known: Mapping[str, str]) -> None:
    for port in ports:
        if port not in known:
            raise UserError(f"step {step}: it has no {direction} port {port}; {suggestion(port, known)}")


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


def _check_carried(carries: Mapping[str, str], carried_kinds: Mapping[str, str], kinds: Mapping[str, str]) -> None:
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
        place, wanted = f"step {step.name}: input {port}", step.spec.input_kinds[port]
        if artifact not in kinds:
            raise UserError(f"{place}: there is no artifact {artifact}; {suggestion(artifact, kinds)}")
        if kinds[artifact] != wanted:
            raise UserError(f"{place} wants kind {wanted}, but artifact {artifact} is of kind {kinds[artifact]}")


def _ordered(steps: Sequence[PlannedStep], producers: Mapping[str, PlannedStep]) -> list[PlannedStep]:
    """Steps in topological order; of those that could come next, the first one in the configuration does."""
    waiting = {step.name: step for step in steps}
    predecessors = {
        step.name: {producers[artifact].name: artifact for artifact in step.inputs.values() if artifact in producers}
        for step in steps
    }
    ordered: list[PlannedStep] = []
    while waiting:
        free = [name for name in waiting if waiting.keys().isdisjoint(predecessors[name])]
        if not free:
            raise UserError(_describe_cycle(waiting, predecessors))
        ordered.append(waiting.pop(free[0]))
    return ordered


def _describe_cycle(waiting: Mapping[str, PlannedStep], predecessors: Mapping[str, Mapping[str, str]]) -> str:
    # Every waiting step waits for another one, so walking backwards must meet a step again.
    path = [next(iter(waiting))]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in predecessors[path[-1]] if name in waiting))
    cycle = path[path.index(path[-1]) :][::-1]
    links = ", ".join(
        f"{reader} reads {predecessors[reader][provider]} of {provider}"
        for provider, reader in itertools.pairwise(cycle)
    )
    return f"pipeline: cycle {' -> '.join(cycle)}: {links}"
