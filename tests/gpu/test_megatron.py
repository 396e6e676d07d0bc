"""The Megatron trainer on Transformer Engine's layers: its names, its scales, and what it computes.

Needs Megatron Core and Transformer Engine beside a Hopper GPU. Transformer Engine reads its environment when it is
imported, so that all tests here share one scale rule.
"""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from threading import Timer
from typing import Any

import pytest
import torch

from fp8core.errors import MemberLost, UserError
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.processes.variables import set_variables
from fp8core.training.megatron.entry import environment
from fp8core.training.ranks import ALONE
from tests.gpu import megatron_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]
SIZES = {"sequences": 8, "prompt": 40, "completion": 88}


@pytest.fixture(scope="module", autouse=True)
def _environment(gpu: torch.device) -> Iterator[None]:
    set_variables(environment(cases.configuration("fp8")).required, {})
    yield
    from fp8core.training.megatron import parallel

    parallel.destroy()


def trainer_of(family: str, precision: str, *changes: str) -> Any:
    from fp8core.training.megatron.trainer import process_trainer

    arch = cases.small(family)
    config = cases.configuration(precision, "training.learning_rate=1e-4", *changes)
    return process_trainer(config, arch, cases.small_policy(arch), ALONE)


def batch_of(family: str) -> Any:
    return cases.random_batch(cases.small(family), **SIZES)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("family", cases.PARITY)
def test_weights_come_back_byte_for_byte(family: str, precision: str) -> None:
    """The names of Transformer Engine's modules are those of the table, and nothing is rounded on the way."""
    found, expected = trainer_of(family, precision).masters, cases.small_policy(cases.small(family))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu().float(), expected[name]) for name in expected)


def test_export_is_quantised_as_the_reference_quantises(gpu: torch.device) -> None:
    arch = cases.small("qwen3")
    formats = rollout_formats(cases.configuration("fp8").precision, arch.num_layers)
    expected = stored_weights(cases.small_policy(arch), formats.stored_names(), formats.recipe.weights)
    found = trainer_of("qwen3", "fp8").export()
    assert found.keys() == expected.keys()
    same = (torch.equal(found[n].cpu().view(torch.uint8), expected[n].view(torch.uint8)) for n in expected)
    assert all(same)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.1), ("fp8", 0.6)])
@pytest.mark.parametrize("family", cases.PARITY)
def test_log_probs_are_near_those_of_fp32(family: str, precision: str, bound: float) -> None:
    batch = batch_of(family)
    config = cases.configuration(precision)
    expected = cases.fp32_logprobs(config, cases.small(family), cases.small_policy(cases.small(family)), batch)
    found = trainer_of(family, precision).logprobs(batch.sequences, cases.TEMPERATURE, ()).logprobs
    assert float((found - expected)[batch.policy_mask].abs().mean()) < bound


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_trainings_of_a_dense_model_are_equal_bit_for_bit(recompute: str) -> None:
    batch, changes = batch_of("qwen3"), f"training.megatron.recompute={recompute}"
    trainers = [trainer_of("qwen3", "fp8", changes) for _ in range(2)]
    for _ in range(3):
        reports = [trainer.step(batch, cases.TEMPERATURE, ()) for trainer in trainers]
        assert reports[0] == reports[1]
    assert trainers[0].describe()["deterministic"]


def test_a_scale_rule_that_transformer_engine_does_not_follow_is_refused(gpu: torch.device) -> None:
    with pytest.raises(UserError, match="imported under the rule pow2"):
        trainer_of("qwen3", "fp8", "precision.scale_rule=fp32")


def test_routes_of_the_rollout_are_replayed(gpu: torch.device) -> None:
    from dataclasses import replace

    batch, arch = batch_of("qwen3-moe"), cases.small("qwen3-moe")
    assert arch.experts is not None
    shape = (*batch.sequences.tokens.shape, arch.num_layers, arch.experts.count)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7)).argsort(-1)
    routes = drawn[..., : arch.experts.per_token].sort(-1).values.short()
    replayed = replace(batch.sequences, experts=torch.where(batch.sequences.valid[..., None, None], routes, -1))
    trainer = trainer_of("qwen3-moe", "bf16", "training.megatron.recompute=full")
    free, forced = (trainer.logprobs(s, cases.TEMPERATURE, ()).logprobs for s in (batch.sequences, replayed))
    assert float((free - forced)[batch.policy_mask].abs().max()) > 1e-2
    report = trainer.step(replace(batch, sequences=replayed), cases.TEMPERATURE, ())
    assert torch.isfinite(torch.tensor(report.grad_norm))


GRIDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "qwen3", {}),
    "data": (2, "qwen3", {}),
    "tensor and sequence": (2, "qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    "experts": (2, "qwen3-moe", {"expert_parallel": 2}),
    "data, tensor and sequence": (4, "qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
}


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_of_a_cluster_compute_what_one_process_does(grid: str, tmp_path: Any) -> None:
    """Each on a GPU of its own, over NCCL; a checkpoint goes on, and a killed rank is an error at once."""
    from stored_weights import stored

    from fp8core.cluster.workers import Cluster

    count, family, spread = GRIDS[grid]
    if torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed")
    settings = [f"training.megatron.{name}={str(value).lower()}" for name, value in spread.items()]
    config = cases.configuration("bf16", "training.learning_rate=1e-4", f"cluster.ranks={count}", *settings)
    arch, batch, one = cases.small(family), batch_of(family), trainer_of(family, "bf16")
    cluster = Cluster(config, True, environment(config))
    try:
        together = cluster.build_trainer(config, arch, stored(tmp_path / "start", cases.small_policy(arch)))
        assert together.export().digest() == one.export().digest()
        found, expected = (t.logprobs(batch.sequences, cases.TEMPERATURE, ()) for t in (together, one))
        assert float((found.logprobs - expected.logprobs)[batch.policy_mask].abs().mean()) < 0.05
        step, alone = (t.step(batch, cases.TEMPERATURE, ()) for t in (together, one))
        assert step.loss == pytest.approx(alone.loss, rel=0.05, abs=0.01)
        assert step.grad_norm == pytest.approx(alone.grad_norm, rel=0.05)
        together.save(tmp_path)
        digest, _ = together.digest(), together.step(batch, cases.TEMPERATURE, ())
        together.load(tmp_path)
        assert (together.version, together.digest()) == (1, digest)
        pid = cluster.workers.places()[f"rank {count - 1}"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(MemberLost, match=f"^rank {count - 1} ended"):
            together.step(batch, cases.TEMPERATURE, ())
    finally:
        cluster.close()
