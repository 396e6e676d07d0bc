"""A process that starts an engine of the class it is told, says so when it runs, and waits for a test to kill it."""

import signal
import sys

from conftest import CONTRACT, OPTIONS, SHAPE

from flows.environment import set_variables
from fp8core.config.capability import this_platform
from fp8core.models.architecture import Architecture
from fp8core.rollout.vllm.requirements import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment

if __name__ == "__main__":
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    from fp8core.rollout.vllm.engine import VllmEngine
    from fp8core.rollout.vllm.process import VllmReplicas

    kind = {found.__name__: found for found in (VllmEngine, VllmReplicas)}[sys.argv[1]]
    engine = kind(Architecture(**SHAPE), CONTRACT, OPTIONS, 16, build)
    print("running", flush=True)
    signal.pause()
