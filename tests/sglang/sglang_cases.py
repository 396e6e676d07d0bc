"""Policies and settings of the tests of SGLang: those of vLLM on Hopper, under a contract that SGLang takes."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from fp8core.config.capability import this_platform
from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.processes.variables import set_variables
from fp8core.rollout.sglang.entry import find_build
from fp8core.rollout.sglang.settings import WORKER, required_environment, suggested_environment

_spec = spec_from_file_location("vllm_policies", Path(__file__).parents[1] / "vllm" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
shared: Any = module_from_spec(_spec)
sys.modules["vllm_policies"] = shared
_spec.loader.exec_module(shared)

FP8 = PrecisionContract(attention="fp8")
BF16 = shared.in_bf16(FP8)
OPTIONS = SglangConfig(kv_cache_gib=0.125, mem_fraction_static=0.3)
SHAPE = shared.SHAPE


def prepared_build() -> Any:
    """The SGLang that is installed, with its environment prepared."""
    build = find_build(this_platform())
    set_variables(required_environment(), suggested_environment())
    return build


def start_engine(
    build: Any, contract: PrecisionContract = FP8, worker: str = WORKER, shape: Any = None, **changes: Any
) -> Any:
    """An engine of the small shape, or of another."""
    from fp8core.rollout.sglang.engine import SglangEngine

    options = OPTIONS.model_copy(update=changes)
    return SglangEngine(Architecture(**(shape or SHAPE)), contract, options, 16, build, worker)


def two_policies() -> Any:
    arch = Architecture(**SHAPE)
    return shared.build_policy(arch, 0, FP8), shared.build_policy(arch, 1, FP8)
