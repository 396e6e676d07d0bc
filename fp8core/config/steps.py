"""What a step of the iteration declares: its ports, the kinds of artifact they carry, its options.

There is no registry. A step is any callable with an attribute `spec`, found by its import path
(`uses: package.module:name`), so a step of the user's own needs no call into this library.
"""

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from fp8core.config.section import Section
from fp8core.errors import UserError


class NoOptions(Section):
    """The options of a step that has none."""


@dataclass(frozen=True)
class StepSpec:
    """The declaration of a step.

    `inputs`, `outputs` and `optional_inputs` map a port to the kind of its artifact; a pipeline must connect
    every port of `inputs` and may connect those of `optional_inputs`. `options` is the model of `with`. A step with
    `redo` changes the live trainer: a restored run executes it again from its stored inputs and compares.
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


def import_step(uses: str) -> Step:
    """The step at an import path `package.module:name`; raises UserError when there is none."""
    module_name, _, attribute = uses.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            raise UserError(f"uses {uses}: there is no module {missing}") from error
        raise UserError(f"uses {uses}: {module_name} imports {missing}, which is not installed") from error
    except ImportError as error:
        raise UserError(f"uses {uses}: {module_name} cannot be imported: {error}") from error
    except SyntaxError as error:
        raise UserError(f"uses {uses}: {error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # Whatever a module of the user's own does when it is imported.
        raise UserError(f"uses {uses}: {_raised_at(error)}{type(error).__name__}: {_first_line(error)}") from error
    if not hasattr(module, attribute):
        raise UserError(f"uses {uses}: module {module_name} has no {attribute}")
    step: Step = getattr(module, attribute)
    if not isinstance(getattr(step, "spec", None), StepSpec):
        raise UserError(f"uses {uses}: {attribute} is not a step: it has no attribute `spec` of type StepSpec")
    return step


def _raised_at(error: BaseException) -> str:
    """The line of a module that was being imported, `file:line: `; nothing for one that is no Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def import_spec(uses: str) -> StepSpec:
    """The declaration of the step at an import path; raises UserError when there is none."""
    return import_step(uses).spec
