"""The rollout engines: each is registered once, with all that code outside its folder may ask of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fp8core.config.shipped import ENGINES
from fp8core.errors import UserError
from fp8core.user_code import import_attribute

if TYPE_CHECKING:
    from fp8core.config.capability import Environment, Node
    from fp8core.config.run import RunConfig
    from fp8core.models.architecture import Architecture
    from fp8core.resources.kernels import Product
    from fp8core.resources.memory import Device, EngineMemory
    from fp8core.rollout.engine import RolloutEngine

Arithmetic = Literal["exact", "kernels", "own"]
Continuation = Literal["equal", "anew", "none"]


def nothing(*_: object) -> "Iterable[Any]":
    return ()


def longest_refusals(setting: str, longest: int | None, arch: "Architecture") -> Iterable[str]:
    if longest is not None and longest > arch.max_positions:
        yield f"{setting}={longest}: the model has {arch.max_positions} positions; lower it, or set it to null"


def no_environment(*_: object) -> "Environment":
    from fp8core.config.capability import Environment

    return Environment()


def host_memory(config: "RunConfig", arch: "Architecture", gpu: "Device | None") -> "EngineMemory":
    from fp8core.resources.memory import EngineMemory, engine_weights

    return EngineMemory((engine_weights(config, arch),))


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine that `rollout.engine` can name. `name` and `build` are enough for one that computes on the host.

    Attributes:
        packages: distributions whose versions checks and environment need (`Node.version`).
        check, check_model: why it cannot run a configuration on a machine, or a model, a message each.
        requirements: what of it is installed, in words; UserError where something is missing.
        gpus: on how many GPUs all engines generate; 0 for the host.
        longest: its own limit of the tokens of a prompt with its completion.
        arithmetic: `exact` as the exact trainer, `kernels` as the packed one, `own` as neither.
        products: those of DeepGEMM, whose kernels `fp8-grpo compile` builds.
        continues: after `PromptGroup.prefix_tokens`: `equal` with the tokens of one go, `anew` with others.
        truncates: whether it samples with `Sampling.truncation`.
        speculates: whether it checks drafts (`rollout.speculation`).
        own_process: whether each training needs a new process, because its libraries read the environment once.
        stock: settings with which it runs its own model.
    """

    name: str
    build: Callable[["RunConfig", "Architecture"], "RolloutEngine"]
    packages: tuple[str, ...] = ()
    check: Callable[["RunConfig", "Node"], Iterable[str]] = nothing
    check_model: Callable[["RunConfig", "Architecture"], Iterable[str]] = nothing
    requirements: Callable[[], str] = lambda: "on this CPU"
    environment: Callable[["RunConfig", "Node"], "Environment"] = no_environment
    memory: Callable[["RunConfig", "Architecture", "Device | None"], "EngineMemory"] = host_memory
    gpus: Callable[["RunConfig"], int] = lambda config: 0
    tensor_parallel: Callable[["RunConfig"], int] = lambda config: 1
    longest: Callable[["RunConfig"], int | None] = lambda config: None
    arithmetic: Callable[["RunConfig"], Arithmetic] = lambda config: "own"
    products: Callable[["RunConfig", "Architecture"], "Iterable[Product]"] = nothing
    continues: Callable[["RunConfig"], Continuation] = lambda config: "none"
    sleeps: Callable[["RunConfig"], bool] = lambda config: False
    truncates: bool = False
    speculates: bool = False
    own_process: bool = False
    stock: Mapping[str, str] = field(default_factory=dict)


def find_entry(name: str) -> EngineEntry:
    """Raises UserError: there is none."""
    entry = import_attribute(ENGINES.get(name, name), f"rollout.engine={name}")
    if not isinstance(entry, EngineEntry):
        raise UserError(f"rollout.engine={name}: it is no EngineEntry (fp8core/rollout/registry.py)")
    return entry


def continuation_of(config: "RunConfig") -> Continuation:
    return engine_entry(config).continues(config)


def longest_row(config: "RunConfig", arch: "Architecture") -> int:
    return min(engine_entry(config).longest(config) or arch.max_positions, arch.max_positions)


def longest_prompt(config: "RunConfig", max_positions: int) -> int:
    """Tokens of the longest prompt that is accepted; `max_positions` are those that model and engine take."""
    return min(config.max_prompt_tokens, max_positions - config.rollout.max_new_tokens)


def longest_sequence(config: "RunConfig", arch: "Architecture") -> int:
    longest = engine_entry(config).longest(config) or arch.max_positions
    return min(config.max_prompt_tokens + config.rollout.max_new_tokens, longest)


def engine_entry(config: "RunConfig") -> EngineEntry:
    return find_entry(config.rollout.engine)
