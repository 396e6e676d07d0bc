"""Optimisers: rules that update one tensor each, how `training.optimiser` names them, and the state of all tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8core.config.shipped import OPTIMISERS
from fp8core.config.training import OptimiserConfig
from fp8core.errors import UserError
from fp8core.resources.memory import Shapes, count
from fp8core.rollout.registry import Arithmetic
from fp8core.user_code import import_attribute


class Update(NamedTuple):
    """The update of a tensor: `number` from 1, and the factor of the gradient that clips it."""

    number: int
    learning_rate: float
    gradient_factor: float = 1.0


class UpdateRule(Protocol):
    """The update of one tensor. `moments`: names of tensors of its shape, zeros at first, which are its state."""

    @property
    def moments(self) -> tuple[str, ...]: ...

    def update(self, master: Tensor, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        """Change an FP32 master and its moments, FP32 or BF16, in place by an FP32 gradient. All are contiguous."""


class Parameter(NamedTuple):
    """A tensor that learns, by its name in the checkpoint or its adapter's, and the arithmetic of its trainer."""

    name: str
    shape: tuple[int, ...]
    arithmetic: Arithmetic


@dataclass(frozen=True, kw_only=True)
class OptimiserEntry:
    """An optimiser that `training.optimiser.name` can name.

    Attributes:
        rule: the rule of a tensor.
        whole_tensors: whether a rule needs more than rows of a tensor, which is what a packed rank has.
        by_element: whether several tensors may be updated as one."""

    name: str
    rule: Callable[[OptimiserConfig, Parameter], UpdateRule]
    whole_tensors: bool = False
    by_element: bool = False


def find_optimiser(settings: OptimiserConfig) -> OptimiserEntry:
    """Raises UserError: there is none."""
    place = f"training.optimiser.name={settings.name}"
    entry = import_attribute(OPTIMISERS.get(settings.name, settings.name), place)
    if not isinstance(entry, OptimiserEntry):
        raise UserError(f"{place}: it is no OptimiserEntry (fp8core/training/optimisers/optimiser.py)")
    return entry


def rules_of(settings: OptimiserConfig, shapes: Shapes, arithmetic: Arithmetic) -> dict[str, UpdateRule]:
    entry = find_optimiser(settings)
    return {name: entry.rule(settings, Parameter(name, shape, arithmetic)) for name, shape in shapes.items()}


def moment_elements(settings: OptimiserConfig, shapes: Shapes) -> int:
    rules = rules_of(settings, shapes, "kernels")
    return sum(len(rule.moments) * count({name: shapes[name]}) for name, rule in rules.items())


class Optimiser:
    """FP32 tensors that learn, on the host, each with a state from its first gradient on.

    `state`: `step/<name>`, the updates of a tensor so far, and `<moment>/<name>`."""

    def __init__(self, settings: OptimiserConfig, trainable: Mapping[str, Tensor]) -> None:
        self._trainable = trainable
        self._rules = rules_of(settings, {name: tuple(tensor.shape) for name, tensor in trainable.items()}, "exact")
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor | None], learning_rate: float) -> None:
        """A tensor without a gradient, such as an expert that no token chose, keeps value and state."""
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if f"step/{name}" not in self.state:
                self.state |= {key: torch.zeros_like(tensor) for key, tensor in self._state_of(name).items()}
            number = int(self.state[f"step/{name}"].add_(1))
            moments = [self.state[f"{moment}/{name}"] for moment in self._rules[name].moments]
            self._rules[name].update(self._trainable[name], gradient, moments, Update(number, learning_rate))

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the names and shapes that a saved state should have."""
        expected: dict[str, Tensor] = {}
        for name in self._trainable:
            if f"step/{name}" in tensors:
                expected |= self._state_of(name)
        return expected

    def _state_of(self, name: str) -> dict[str, Tensor]:
        moments = {f"{moment}/{name}": self._trainable[name] for moment in self._rules[name].moments}
        return {f"step/{name}": torch.zeros(()), **moments}
