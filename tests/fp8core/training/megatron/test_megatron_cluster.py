"""Megatron on the ranks of a Ray cluster, in FP32 over Gloo: two tensor-parallel ones beside one process.

One Ray cluster of this machine serves all tests. Other grids: test_megatron_processes.py.
"""

from importlib.util import find_spec

import pytest
import torch
from stored_weights import masters_of, stored

from fp8core.cluster.workers import Cluster
from fp8core.config.capability import this_node
from fp8core.config.load import load_config
from fp8core.numerics.fingerprint import policy_digest
from fp8core.run.build import engine_environment
from fp8core.training.megatron import parallel
from fp8core.training.ranks import ALONE
from fp8core.training.registry import packages_of, trainer_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

SETTINGS = {
    "precision.rollout": {"linear": "fp32", "kv_cache": "fp32"},
    "precision.training": {"linear": "fp32", "kv_cache": "fp32"},
    "training.trainer": "megatron",
    "training.learning_rate": 1e-3,
    "training.warmup_steps": 0,
    "training.megatron.micro_batch_tokens": 128,
}


@pytest.fixture(scope="module")
def policy(architecture, masters_of):
    return (arch := architecture()), masters_of(arch)


@pytest.fixture(scope="module")
def alone(policy):
    """alone(): the trainer of one process, that of this test."""
    config = load_config("tiny", SETTINGS)
    yield lambda: trainer_of(config.training).build(config, *policy, ALONE)
    parallel.destroy()


@pytest.fixture(scope="module")
def cluster_of_two():
    """A configuration of two ranks, and its cluster."""
    config = load_config("tiny", {**SETTINGS, "training.megatron.tensor_parallel": 2, "cluster.ranks": 2})
    cluster = Cluster(config, True, engine_environment(config, this_node(packages_of(config))))
    yield config, cluster
    cluster.close()


@pytest.fixture
def start(policy, tmp_path):
    """The policy as ranks take it."""
    arch, masters = policy
    return arch, stored(tmp_path / "start", masters)


@pytest.fixture
def together(cluster_of_two, start):
    """The trainer of two ranks."""
    config, cluster = cluster_of_two
    trainer = cluster.build_trainer(config, *start)
    yield trainer
    trainer.close()


def largest(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def test_two_ranks_compute_what_one_process_does(together, alone, policy, ragged_batch, tmp_path):
    one = alone()
    assert largest(masters_of(together, tmp_path / "before"), policy[1]) == 0
    assert together.start_digest == policy_digest(policy[1])
    assert together.export().digest() == one.export().digest()
    found, expected = (trainer.logprobs(ragged_batch.sequences, 0.9, ()) for trainer in (together, one))
    mask = ragged_batch.mask
    assert torch.allclose(found.logprobs[mask], expected.logprobs[mask], rtol=0, atol=1e-5)
    for _ in range(2):
        ours, theirs = (vars(trainer.step(ragged_batch, 0.9, ())) for trainer in (together, one))
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    assert largest(masters_of(together, tmp_path / "after"), one.masters) < 1e-4
    assert together.describe()["ranks"] == 2
