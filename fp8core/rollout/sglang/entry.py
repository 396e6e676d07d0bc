"""SGLang as a registered engine: its checks, its environment, its memory, and how it is built."""

from collections.abc import Iterator

from fp8core.config.capability import Environment, Node, this_platform
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.resources.memory import Device, EngineMemory, engine_weights, shipped_bytes
from fp8core.rollout.engine import RolloutEngine
from fp8core.rollout.registry import EngineEntry, longest_refusals
from fp8core.rollout.requirements import resident_memory, temperature_refusals
from fp8core.rollout.sglang.requirements import LOWEST_TEMPERATURE, contract_refusals, find_build, model_refusals
from fp8core.rollout.sglang.settings import required_environment, suggested_environment

# CUDA context, activations, captured graphs.
_WORKSPACE = 5_000_000_000
_LONGEST = "rollout.sglang.context_length"


def _build(config: RunConfig, arch: Architecture) -> RolloutEngine:
    # SGLang is optional.
    from fp8core.rollout.sglang.engine import SglangEngine

    rollout = config.rollout
    return SglangEngine(arch, config.precision, rollout.sglang, rollout.max_batch, find_build(this_platform()))


def _check(config: RunConfig, node: Node) -> Iterator[str]:
    build = find_build(node.platform, node.version)
    yield from contract_refusals(config.precision, config.rollout.sglang, build)
    yield from temperature_refusals(config.rollout.temperature, LOWEST_TEMPERATURE, "SGLang")


def _check_model(config: RunConfig, arch: Architecture) -> Iterator[str]:
    yield from longest_refusals(_LONGEST, config.rollout.sglang.context_length, arch)
    yield from model_refusals(arch, config.precision, config.rollout.sglang)


def _environment(config: RunConfig, node: Node) -> Environment:
    find_build(node.platform, node.version)
    return Environment(required_environment(), suggested_environment())


def _memory(config: RunConfig, arch: Architecture, gpu: Device | None) -> EngineMemory:
    options, weights = config.rollout.sglang, engine_weights(shipped_bytes(arch, config.precision))
    if gpu is None:
        return EngineMemory((weights,))
    return resident_memory(
        config,
        arch,
        gpu,
        options,
        weights=weights,
        share=("rollout.sglang.mem_fraction_static", options.mem_fraction_static),
        longest=(_LONGEST, _longest(config, arch)),
        workspace=_WORKSPACE,
        workspace_in_share=False,
    )


def _longest(config: RunConfig, arch: Architecture) -> int:
    return config.rollout.sglang.context_length or arch.max_positions


ENGINE = EngineEntry(
    name="sglang",
    packages=("sglang",),
    build=_build,
    check=_check,
    check_model=_check_model,
    requirements=lambda: find_build(this_platform()).described,
    environment=_environment,
    memory=_memory,
    gpus=lambda config: config.cluster.engines,
    longest=_longest,
    arithmetic=lambda config: "kernels" if config.rollout.sglang.model == "aligned" else "own",
    continues=lambda config: "equal" if config.rollout.sglang.model == "aligned" else "anew",
    sleeps=lambda config: config.rollout.sglang.sleep,
    # Its own model rounds where no points of a contract do.
    stock={"rollout.sglang.model": "stock", "precision.rounding_points": "stepwise"},
)
