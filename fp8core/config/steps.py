"""The declaration of one iteration: its steps, and what each needs, provides and accepts as options.

An artifact has one name and one producer in an iteration. `needs` and `provides` map a step's ports to artifact names;
a port that is not mentioned has the artifact of its own name.

There is no registry of steps. A step is any callable with an attribute `spec`, found by its import path
(`uses: package.module:name`). So a step of the user's own needs no call into this library.
"""

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, Field

from fp8core.config.section import Section
from fp8core.errors import UserError, first_line


class StepConfig(Section):
    """One step of the iteration."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z][a-z0-9_]*$")
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
    """The steps of one iteration, and what one iteration hands to the next."""

    steps: list[StepConfig] = Field(min_length=1)
    carries: dict[str, str] = Field(
        default_factory=lambda: {"policy": "next_policy", "scales": "next_scales"},
        description="Artifact at the start of an iteration -> artifact that replaces it at the end.",
    )


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
        raise UserError(f"{place}: {_raised_at(error)}{type(error).__name__}: {first_line(error)}") from error
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
