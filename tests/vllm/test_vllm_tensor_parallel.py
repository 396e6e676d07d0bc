"""An engine whose layers two processes share: it holds what was sent, generates by it, and every fault shows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import (
    CONTRACT,
    ON_GPU,
    OPTIONS,
    SHAPE,
    build_policy,
)
from generation_cases import build_groups, collect

from fp8core.models.architecture import Architecture
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.engine import Probe, Sampling
from fp8core.rollout.slots import EngineUpdateError
from fp8core.run.policy import SyncError, check_formats, check_report

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SAMPLING = Sampling(1.0, 12, frozenset({3}))
# On a GPU halves are whole tiles.
ARCH = Architecture(**{**SHAPE, "intermediate_size": 512 if ON_GPU else 192})


@pytest.fixture(scope="module")
def policies():
    return build_policy(ARCH, 0), build_policy(ARCH, 1)


@pytest.fixture(scope="module")
def pair(vllm_build) -> Iterator[Any]:
    from fp8core.rollout.vllm.engine import VllmEngine

    shared = OPTIONS.model_copy(update={"tensor_parallel": 2})
    engine = VllmEngine(ARCH, CONTRACT, shared, 16, vllm_build, "faulty_worker.FaultyWorker")
    yield engine
    engine.close()


def test_generation_follows_every_update(pair, policies):
    groups = build_groups(4, 4)
    for policy in (policies[1], policies[0]):
        report = pair.update(policy.tensors, policy.scales, policy.version)
        check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
        assert pair.fingerprint() == policy_digest(policy.tensors)
        found = collect(pair, groups, SAMPLING)
        reported = torch.tensor([logprob for completion in found for logprob in completion.logprobs])
        distances = [
            float((reported - torch.cat(each.logprobs(groups, found, 1.0))).abs().mean())
            for each in (policy, policies[1 - policy.version])
        ]
        # Each layer adds two sums of BF16 that one process rounds once.
        assert distances[0] < 3 * policy.bounds(groups, found, 1.0).mean < 1 < distances[1]
    check_formats(pair.describe(), CONTRACT)


def test_it_scores_as_it_generates(pair, policies):
    pair.update(policies[0].tensors, policies[0].scales, 0)
    groups = build_groups(3, 1)
    found = collect(pair, groups, Sampling(1.0, 1, frozenset()))
    (scored,) = pair.score([Probe(groups[done.group].prompt, done.tokens[0]) for done in found], 1.0)
    assert scored == pytest.approx([done.logprobs[0] for done in found], abs=1e-3)


@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("fault", ["skipped_tensor", "stale_layer", "swapped_tiles", "swapped_parts", "flipped_bit"])
def test_a_fault_in_one_share_is_caught(pair, policies, fault, share):
    policy = policies[1]
    pair.update(policies[0].tensors, policies[0].scales, 0)
    pair.ask_policy("commit_fault", fault, share)

    def sync() -> None:
        report = pair.update(policy.tensors, policy.scales, 1)
        check_report(report, policy_digest(policy.tensors), policy.scales, 1)

    try:
        with pytest.raises(
            (SyncError, EngineUpdateError), match=r"policy 1.*(was|were) sent|2 workers hold different bytes"
        ):
            sync()
    finally:
        pair.ask_policy("commit_fault", "")
