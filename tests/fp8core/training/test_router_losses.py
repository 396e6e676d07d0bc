"""Losses of routers: against autograd through their definition, for every cut of an update into passes."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from thread_ranks import on_threads

from fp8core.config.loss import LossConfig, RouterLossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Experts
from fp8core.models.router_losses import RouterObjective, router_metrics
from fp8core.numerics.grouped import top_k
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.training.packed.context import PackShare
from fp8core.training.ranks import ALONE

CPU = torch.device("cpu")
EXPERTS, K = 6, 2
LENGTHS = (2, 30, 200, 7, 90)
# Row 3 has no token in the loss.
ACTIVE = (0, 1, 2, 4)
WEIGHTS = RouterLossConfig(load_balancing=0.7, z=0.2)
MOE = Experts(count=4, per_token=2, intermediate_size=48, normalise_top_k=True, sparse_step=1, dense_layers=())
_FP32 = {"linear": "fp32", "kv_cache": "fp32"}
FP32 = PrecisionContract(rollout=SidePrecision(**_FP32), training=TrainingPrecision(**_FP32))
_BF16 = {"linear": "bf16", "kv_cache": "bf16"}
BF16 = PrecisionContract(rollout=SidePrecision(**_BF16), training=TrainingPrecision(**_BF16), rounding_points="kernels")
FP8 = PrecisionContract(rounding_points="kernels")


LOGITS = [3 * torch.randn(length, EXPERTS, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def defined():
    """Gradients by row of the definition, by autograd in FP64, and both losses without their weights."""
    leaves = [each.double().requires_grad_() for each in LOGITS]
    balance = z = torch.zeros((), dtype=torch.float64)
    for row in ACTIVE:
        chosen = leaves[row].detach().topk(K).indices
        share = torch.bincount(chosen.flatten(), minlength=EXPERTS).double() / chosen.numel()
        balance = balance + EXPERTS * (share * leaves[row].softmax(-1).mean(0)).sum() / len(ACTIVE)
        tokens = sum(LENGTHS[each] for each in ACTIVE)
        z = z + leaves[row].logsumexp(-1).square().sum() / tokens
    loss = WEIGHTS.load_balancing * balance + WEIGHTS.z * z
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    whole = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
    return whole, float(balance.detach()), float(z.detach())


def computed(ranks, passes):
    """The same of passes of rows, each shared by ranks: gradients of this rank's tokens, by row with their positions,
    and the metrics."""
    batch = TokenBatch.of([[2] * (length - 1) for length in LENGTHS], [[3]] * len(LENGTHS))
    loss_mask = torch.tensor([[row in ACTIVE] for row in range(len(LENGTHS))])
    objective = RouterObjective.of(WEIGHTS, batch.valid, loss_mask)
    gradients, statistics = {}, []
    for rows in passes:
        share = PackShare.of(batch.part(rows), ranks, CPU)
        losses = objective.part(rows)
        losses.place(share.sequences, share.summed)
        positions = share.attention.positions
        own = torch.full((len(share.tokens), EXPERTS), 9.0)
        places = {row: share.sequences == place for place, row in enumerate(range(len(LENGTHS))[rows])}
        for row, place in places.items():
            own[place] = LOGITS[row][positions[place]]
        found = losses.gradient(own, top_k(own, K).int())
        assert not found[~share.valid].any()
        gradients |= {row: (positions[place], found[place]) for row, place in places.items()}
        statistics.append(losses.statistics())
    return gradients, router_metrics(torch.stack(statistics).sum(0))


@pytest.mark.parametrize("passes", [[slice(0, 5)], [slice(0, 2), slice(2, 5)], [slice(i, i + 1) for i in range(5)]])
def test_gradients_are_those_of_the_definition_however_rows_and_ranks_share_passes(passes):
    expected, balance, z = defined()
    ((alone, metrics),) = on_threads(1, lambda ranks: computed(ALONE, passes))
    load = torch.cat([top_k(LOGITS[row], K) for row in ACTIVE]).flatten().bincount()
    assert metrics == pytest.approx(
        {
            "router_load_balancing": balance,
            "router_z": z,
            "router_load": float(load.max() / load.double().mean()),
        }
    )
    whole, _ = computed(ALONE, [slice(0, 5)])
    for row, gradient in enumerate(expected):
        assert torch.allclose(alone[row][1].double(), gradient, rtol=1e-6, atol=1e-9)
        assert bool(gradient.any()) == (row in ACTIVE)
        assert torch.equal(alone[row][1], whole[row][1])
    for count in (2, 3):
        for found, own_metrics in on_threads(count, lambda ranks: computed(ranks, passes)):
            assert own_metrics == pytest.approx(metrics)
            for row, (positions, gradient) in found.items():
                assert torch.equal(gradient, alone[row][1][positions])


@pytest.fixture
def learnt(architecture, masters_of, trainer_of, packed_of, first_scales, rollout_batch, tmp_path):
    """(contract, settings) to the gradients and the report of an update that router losses alone make."""
    arch = architecture(family="qwen3_moe", num_layers=3, experts=MOE)

    def learn(contract, masters=None, weights=WEIGHTS, **settings):
        exact = trainer_of(contract, arch)
        scales = first_scales(exact, contract)
        batch = rollout_batch(exact, scales)
        batch = replace(batch, advantages=torch.zeros(len(batch.advantages)))
        objective = Objective(LossConfig(router=weights), CorrectionConfig())
        training = TrainingConfig(optimiser={"beta1": 0.0}, max_grad_norm=1e9, **settings)
        build = packed_of if training.computes_packed else trainer_of
        trainer = build(contract, arch, training, objective, masters=masters or masters_of(arch))
        report = trainer.step(batch, 1.0, scales.layers)
        trainer.save(tmp_path)
        # The next trainer's file takes the place of this one.
        moments = load_file(tmp_path / "optimiser.safetensors")
        return {name: moments[f"exp_avg/{name}"].clone() for name in trainer.masters}, report

    learn.masters = masters_of(arch)
    return learn


@pytest.mark.parametrize("loss", ["load_balancing", "z"])
def test_gradients_are_the_slopes_of_the_reported_losses(loss, learnt):
    """Of an FP32 policy in the direction of its gradient; the choice of experts stays."""
    weights = RouterLossConfig(**{loss: 1.0})
    gradients, report = learnt(FP32, weights=weights)
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    size = 1e-4
    ends = []
    for step in (-size, size):
        masters = {name: each + step / norm * gradients[name] for name, each in learnt.masters.items()}
        end = learnt(FP32, masters, weights)[1]
        assert end.router_load == report.router_load
        ends.append(3 * getattr(end, f"router_{loss}"))
    assert (ends[1] - ends[0]) / (2 * size) == pytest.approx(norm, rel=2e-3)


@pytest.mark.parametrize(("contract", "bound", "equal"), [(FP8, 0.1, 1e-12), (BF16, 0.02, 1e-3)], ids=["fp8", "bf16"])
def test_the_packed_trainer_has_the_gradients_of_the_exact_one(contract, bound, equal, learnt):
    expected, report = learnt(contract)
    for settings in ({}, {"activation_checkpointing": True, "tokens_per_pass": 128}):
        found, ours = learnt(contract, packed=True, **settings)
        for name in ("router_load", "router_load_balancing", "router_z"):
            assert getattr(ours, name) == pytest.approx(getattr(report, name), rel=equal), name
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= bound * gradient.norm(), name
        assert found["model.layers.0.mlp.gate.weight"].any()


def test_rows_of_the_exact_trainer_do_not_depend_on_their_company(learnt):
    whole, parts = (learnt(FP32, micro_batch=size)[0] for size in (6, 1))
    for name, gradient in whole.items():
        assert (parts[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_a_dense_policy_reports_no_router(trainer_of, architecture, first_scales, rollout_batch):
    trainer = trainer_of(FP8, architecture())
    scales = first_scales(trainer, FP8)
    content = trainer.step(rollout_batch(trainer, scales), 1.0, scales.layers).content()
    assert not [name for name in content if name.startswith("router")]
