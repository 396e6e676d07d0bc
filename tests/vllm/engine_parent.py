"""A process that starts an engine here or on a cluster, says so when it runs, and waits for a test to kill it."""

import signal
import sys

from conftest import CONTRACT, OPTIONS, REPLICAS, SHAPE

from fp8core.config.capability import this_platform
from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.processes.variables import set_variables
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.run.build import open_cluster

if __name__ == "__main__":
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    from fp8core.rollout.vllm.engine import VllmEngine

    arch = Architecture(**SHAPE)
    if sys.argv[1] == "here":
        engine = VllmEngine(arch, CONTRACT, OPTIONS, 16, build)
    else:
        config = load_config(
            "tiny", REPLICAS | {"rollout.engine": "vllm", "cluster.engines": 1, "cluster.placement": "separate"}
        )
        cluster = open_cluster(config)
        assert cluster is not None
        engine = cluster.build_engine(config, arch)
    print("running", flush=True)
    signal.pause()
