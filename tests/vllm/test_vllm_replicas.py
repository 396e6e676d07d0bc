"""Two engines, each in a process of a Ray cluster: they do what one does, hold what was sent, and leave nothing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from conftest import CONTRACT, ON_GPU, REPLICAS, SHAPE, wait_until_gone
from faulty_engine import commit_fault
from generation_cases import build_groups, collect
from stored_weights import stored

from fp8core.cluster.workers import Cluster, RankedTrainer, ReplicaError, ReplicatedEngine
from fp8core.config.load import load_config
from fp8core.errors import MemberLost
from fp8core.models.architecture import Architecture
from fp8core.models.safetensors_files import FileTensors
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import Probe, Sampling
from fp8core.run.build import open_cluster
from fp8core.run.policy import check_formats, check_report

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SAMPLING = Sampling(1.0, 12, frozenset({3}))
SETTINGS = {**REPLICAS, "rollout.engine": "faulty_engine:ENGINE"}


@dataclass
class Replicas:
    """Two engines, and a trainer in a process of its own for each policy."""

    cluster: Cluster
    engine: ReplicatedEngine
    trainers: list[RankedTrainer]

    def commit_fault(self, index: int, fault: str) -> None:
        """The fault of one engine from now on."""
        member = self.cluster.workers.engines[index]
        self.cluster.workers.gather([member.send("build", "fault", commit_fault, (self.engine._key,), fault)])


@pytest.fixture(scope="module")
def starts(policies, tmp_path_factory) -> list[FileTensors]:
    """The weights of each policy, in a file."""
    folder = tmp_path_factory.mktemp("starts")
    return [stored(folder / str(policy.version), policy.trainer.masters) for policy in policies]


@pytest.fixture(scope="module")
def started_pair(vllm_build, starts) -> Iterator[Replicas]:
    config, arch = load_config("tiny", SETTINGS), Architecture(**SHAPE)
    cluster = open_cluster(config)
    assert cluster is not None
    trainers = [cluster.build_trainer(config, arch, start) for start in starts]
    yield Replicas(cluster, cluster.build_engine(config, arch), trainers)
    cluster.close()


@pytest.fixture
def replicas(started_pair, policies, starts):
    """They hold policy 0; a test that ended one has had them replaced."""
    pair = started_pair
    if not pair.cluster.workers.alive:
        config, arch = load_config("tiny", SETTINGS), Architecture(**SHAPE)
        pair.cluster.replace()
        pair.trainers = [pair.cluster.build_trainer(config, arch, start) for start in starts]
        pair.engine = pair.cluster.build_engine(config, arch)
    for index in range(2):
        pair.commit_fault(index, "")
    pair.engine.update(pair.trainers[0].export(), policies[0].scales, 0)
    return pair


def test_one_update_reaches_both_and_is_read_back(replicas, policies):
    for policy, trainer in zip(policies, replicas.trainers, strict=True):
        report = replicas.engine.update(trainer.export(), policy.scales, policy.version)
        check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
        assert replicas.engine.fingerprint() == policy_digest(policy.tensors)


def test_they_do_what_one_engine_does(replicas, engine):
    groups, probes = build_groups(7, 4), [Probe(group.prompt, 5) for group in build_groups(3, 1)]
    check_formats(replicas.engine.describe(), CONTRACT)
    assert replicas.engine.describe() == engine.describe()
    # One at a time: the last bits depend on how many rows the core takes together, which time decides.
    for probe in probes:
        (scored,) = engine.score([probe], 1.0)
        assert replicas.engine.score([probe], 1.0) == [scored, scored]
    found, expected = collect(replicas.engine, groups, SAMPLING), collect(engine, groups, SAMPLING)
    assert [(done.group, done.sample) for done in found] == [(done.group, done.sample) for done in expected]
    # On a GPU what an engine computes depends on what it decodes together.
    if not ON_GPU:
        assert [done.tokens for done in found] == [done.tokens for done in expected]


@pytest.mark.parametrize("fault", ["flipped_bit", "wrong_version"])
def test_a_fault_in_one_engine_is_named(replicas, policies, fault):
    replicas.commit_fault(1, fault)
    with pytest.raises(ReplicaError, match=r"^engine 1 and engine 0 hold another (digest|version): "):
        replicas.engine.update(replicas.trainers[1].export(), policies[1].scales, 1)
    replicas.commit_fault(1, "")
    replicas.engine.update(replicas.trainers[1].export(), policies[1].scales, 1)
    assert replicas.engine.fingerprint() == policy_digest(policies[1].tensors)


def test_an_engine_that_is_killed_ends_the_generation_and_leaves_nothing(replicas):
    """Its process; test_vllm_lifeline.py kills what is below one."""
    member = psutil.Process(replicas.cluster.workers.engines[1].place.pid)
    below = member.children(recursive=True)
    running = replicas.engine.generate(build_groups(60, 4), Sampling(1.0, 60, frozenset()))
    next(running)
    member.kill()
    began = time.monotonic()
    with pytest.raises(MemberLost, match=r"^engine 1 ended: "):
        list(running)
    assert time.monotonic() - began < 15
    assert not replicas.cluster.workers.alive
    wait_until_gone(below)
