"""Two engines in processes of their own: they do what one does, hold what was sent, and none is left behind."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from conftest import CONTRACT, ON_GPU, OPTIONS, SHAPE, build_groups, collect, wait_until_gone

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import PolicyScales, Probe, Sampling
from fp8core.rollout.vllm.process import EngineProcessError, VllmReplicas
from fp8core.rollout.vllm.weights import UpdateError
from fp8core.run.policy import check_formats, check_report

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SAMPLING = Sampling(1.0, 12, frozenset({3}))
FIRST, SECOND = ("vLLM on GPU 0", "vLLM on GPU 1") if ON_GPU else ("vLLM's process 0", "vLLM's process 1")


@pytest.fixture(scope="module")
def pair(vllm_build: Any) -> Iterator[VllmReplicas]:
    """Two engines, whose workers can be told to fail."""
    options = OPTIONS.model_copy(update={"gpus": 2})
    found = VllmReplicas(Architecture(**SHAPE), CONTRACT, options, 16, vllm_build, "faulty_worker.FaultyWorker")
    yield found
    found.close()


@pytest.fixture
def replicas(pair, policies):
    """They hold policy 0."""
    pair.update(policies[0].tensors, policies[0].scales, 0)
    return pair


def test_one_update_reaches_both_and_is_read_back(replicas, policies):
    for policy in (policies[1], policies[0]):
        report = replicas.update(policy.tensors, policy.scales, policy.version)
        check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
        assert replicas.fingerprint() == policy_digest(policy.tensors)


def test_they_run_what_the_contract_says(replicas, engine):
    described = replicas.describe()
    check_formats(described, CONTRACT)
    assert described.pop("engines") == 2
    assert described == engine.describe()


def test_they_generate_what_one_engine_does(replicas, engine):
    groups = build_groups(7, 4)
    found, expected = collect(replicas, groups, SAMPLING), collect(engine, groups, SAMPLING)
    assert [(done.group, done.sample) for done in found] == [(done.group, done.sample) for done in expected]
    # On a GPU what an engine computes depends on what it decodes together.
    if not ON_GPU:
        assert [done.tokens for done in found] == [done.tokens for done in expected]


def test_every_engine_scores_the_probe(replicas, engine):
    probes = [Probe(group.prompt, 5) for group in build_groups(3, 1)]
    (expected,) = engine.score(probes, 1.0)
    assert replicas.score(probes, 1.0) == [expected, expected]


def test_groups_come_whole_from_the_engine_that_they_were_dealt_to(replicas):
    batches = list(replicas.generate(build_groups(24, 4), SAMPLING))
    assert sorted(group for batch in batches for group in {done.group for done in batch}) == list(range(24))
    assert all(len(batch) == 4 * len({done.group for done in batch}) for batch in batches)
    assert all(len({done.group % 2 for done in batch}) == 1 for batch in batches)
    assert {batch[0].group % 2 for batch in batches} == {0, 1}


def test_an_engine_may_have_nothing_to_do(replicas):
    assert len(collect(replicas, build_groups(1, 4), SAMPLING)) == 4
    assert collect(replicas, [], SAMPLING) == []


@pytest.mark.parametrize("fault", ["flipped_bit", "wrong_version"])
def test_a_fault_in_one_engine_is_named(replicas, policies, fault):
    replicas.call_worker(1, "policy_commit_fault", fault)
    try:
        with pytest.raises(UpdateError, match=rf"^policy 1: {SECOND} holds (\w+) \w+, {FIRST} holds \1 \w+$"):
            replicas.update(policies[1].tensors, policies[1].scales, 1)
    finally:
        replicas.call_worker(1, "policy_commit_fault", "")
    replicas.update(policies[1].tensors, policies[1].scales, 1)
    assert replicas.fingerprint() == policy_digest(policies[1].tensors)


def test_weights_that_differ_later_are_noticed(replicas, policies):
    replicas.call_worker(0, "policy_commit_fault", "stale_layer")
    try:
        with pytest.raises(UpdateError, match="holds weights"):
            replicas.update(policies[1].tensors, policies[1].scales, 1)
        with pytest.raises(UpdateError, match=f"^{SECOND} and {FIRST} have other weights: "):
            replicas.fingerprint()
    finally:
        replicas.call_worker(0, "policy_commit_fault", "")


def test_what_does_not_fit_changes_nothing(replicas, policies):
    tensors = policies[1].tensors
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(UpdateError, match=rf"^{FIRST}: .*k_proj.weight is missing"):
        replicas.update(tensors, policies[1].scales, 1)
    with pytest.raises(ValueError, match="scales of policy 0 sent with weights of policy 1"):
        replicas.update(policies[1].tensors, PolicyScales(0, policies[0].scales.layers), 1)
    assert replicas.fingerprint() == policy_digest(policies[0].tensors)


def test_a_prompt_that_does_not_fit_is_a_mistake_of_the_user(replicas):
    with pytest.raises(UserError, match=r"^prompt prompt-\d+: .*rollout.vllm.max_model_len is 256"):
        collect(replicas, build_groups(4, 1), Sampling(1.0, 250, frozenset()))
    assert len(collect(replicas, build_groups(4, 1), SAMPLING)) == 4


def test_an_engine_that_fails_is_named_with_what_it_said(replicas):
    with pytest.raises(EngineProcessError, match=rf"(?s)^{SECOND} failed: .*policy_unknown.*Traceback"):
        replicas.call_worker(1, "policy_unknown")


def test_generation_can_be_abandoned(replicas, policies):
    running = replicas.generate(build_groups(24, 4), Sampling(1.0, 200, frozenset()))
    next(running)
    running.close()
    replicas.update(policies[0].tensors, policies[0].scales, 0)
    assert len(collect(replicas, build_groups(2, 2), SAMPLING)) == 4


def test_an_engine_that_is_killed_ends_the_generation(replicas, policies):
    """The last that the fixture's engines see."""
    _, killed = (child for child in psutil.Process().children() if "vllm.process" in " ".join(child.cmdline()))
    below = killed.children(recursive=True)
    running = replicas.generate(build_groups(60, 4), Sampling(1.0, 200, frozenset()))
    next(running)
    killed.kill()
    with pytest.raises(EngineProcessError, match=f"^{SECOND} ended with exit code -9$"):
        list(running)
    assert below
    wait_until_gone(below)
    with pytest.raises(EngineProcessError, match=f"^{SECOND} ended with exit code -9$"):
        replicas.update(policies[0].tensors, policies[0].scales, 0)
