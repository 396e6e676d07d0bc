"""vLLM with a worker that can be told to do its work wrong, as an engine of the user's own (`rollout.engine`)."""

from dataclasses import replace
from typing import Any

from fp8core.config.capability import this_platform
from fp8core.rollout.vllm.entry import ENGINE as VLLM
from fp8core.rollout.vllm.entry import find_build


def _build(config: Any, arch: Any) -> Any:
    from fp8core.rollout.vllm.engine import VllmEngine

    rollout, build = config.rollout, find_build(this_platform())
    return VllmEngine(arch, config.precision, rollout.vllm, rollout.max_batch, build, "faulty_worker.FaultyWorker")


ENGINE = replace(VLLM, name="faulty", build=_build)


def commit_fault(part: Any, fault: str) -> None:
    """In the process of an engine: the fault of its writes from now on; an empty name for none."""
    part._engine.ask_policy("commit_fault", fault)
