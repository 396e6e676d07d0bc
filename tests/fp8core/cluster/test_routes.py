"""The way by which each engine gets its weights."""

import pytest

from fp8core.cluster.member import HostProcess
from fp8core.cluster.workers import find_routes


def places(*where):
    return [HostProcess(host, gpu, 0, "") for host, gpu in where]


TWO_HOSTS = places(("a", "0"), ("a", "1"), ("b", "0"))


@pytest.mark.parametrize(
    ("ranks", "holders", "colocated", "ways"),
    [
        (TWO_HOSTS, [0, 1, 2], True, [(0, "memory"), (1, "memory"), (2, "memory")]),
        (TWO_HOSTS, [0], True, [(0, "memory"), (0, "memory"), (0, "nccl")]),
        (TWO_HOSTS[:1], [0], True, [(0, "memory"), (0, "memory"), (0, "nccl")]),
        (places(("a", "2")), [0], False, [(0, "nccl")] * 3),
        (TWO_HOSTS, [], True, [(0, "gloo")] * 3),
    ],
    ids=["every rank has all", "rank 0 has all", "one rank", "separate", "in main memory"],
)
def test_an_engine_reads_its_own_gpu_first_and_its_host_then(ranks, holders, colocated, ways):
    found = find_routes(ranks, TWO_HOSTS, holders, colocated)
    assert [route.engine for route in found] == [0, 1, 2]
    assert [(route.rank, route.path) for route in found] == ways


def test_an_engine_without_a_gpu_receives_tensors():
    (route,) = find_routes(TWO_HOSTS, places(("a", None)), [0, 1, 2], True)
    assert (route.rank, route.path) == (0, "gloo")
