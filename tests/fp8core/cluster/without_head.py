"""A process whose cluster loses its head; it prints the error, and the seconds until it could end.

Its calls last so many seconds, one after the other; it looks for the head as often as the second argument says.
"""

import os
import signal
import sys
import time

import ray
from ray.cluster_utils import Cluster

from fp8core.cluster import connection
from fp8core.cluster.gang import Gang
from fp8core.config.capability import Environment
from fp8core.config.load import load_config
from fp8core.errors import HeadLost


def main() -> None:
    seconds, connection._HEAD_SECONDS = map(float, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    config = load_config("tiny", {"cluster.address": cluster.address})
    gang = Gang(config.cluster, 1, False, Environment(), 1)
    os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 200:
            gang.gather([gang.ranks[0].send("build", "sleep", time.sleep, (), seconds)])
    except HeadLost as error:
        gang.close()
        print("HeadLost", error, time.monotonic() - began, flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
