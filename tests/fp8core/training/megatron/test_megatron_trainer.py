"""The trainer computes what the reference decoder computes, in Megatron's local layers behind a pretended GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from megatron_cases import FAMILIES, FP32
from pretended_gpu import pretended_gpu

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.weights import reference_formats
from fp8core.numerics.grouped import top_k
from fp8core.rl.objective import Objective
from fp8core.training.exact import ExactTrainer
from fp8core.training.megatron import parallel
from fp8core.training.megatron.trainer import MegatronTrainer
from fp8core.training.ranks import ALONE
from fp8core.training.trainer import NotFiniteError

CPU = torch.device("cpu")
TRAINING = TrainingConfig(learning_rate=1e-3, epochs=2, deterministic=False, megatron={"micro_batch_tokens": 128})
OBJECTIVE = Objective(LossConfig(router={"load_balancing": 0.5, "z": 0.05}), CorrectionConfig())
TEMPERATURE = 0.9
ROUTER = ("router_load", "router_load_balancing", "router_z")


@pytest.fixture(scope="module", autouse=True)
def _grid_of_one() -> Iterator[None]:
    with pretended_gpu():
        yield
    parallel.destroy()


def megatron_trainer(arch, masters, contract=FP32):
    return MegatronTrainer(arch, masters, contract, TRAINING, OBJECTIVE, CPU, ALONE)


def torch_trainer(arch, masters):
    formats = reference_formats(arch.num_layers)
    return ExactTrainer(arch, masters, formats, formats, TRAINING, OBJECTIVE)


def largest(found, expected):
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def test_scores_and_statistics_equal_the_torch_trainers(family, masters_of, ragged_batch):
    masters = masters_of(family)
    found, expected = (
        make(family, masters).logprobs(ragged_batch.sequences, TEMPERATURE, ())
        for make in (megatron_trainer, torch_trainer)
    )
    for name in ("logprobs", "entropy"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert torch.equal(ours.isnan(), ~ragged_batch.policy_mask)
        assert torch.allclose(ours[ragged_batch.policy_mask], theirs[ragged_batch.policy_mask], rtol=0, atol=1e-5)
    for ours, theirs in zip(found.statistics.amax(), expected.statistics.amax(), strict=True):
        assert vars(ours) == pytest.approx(vars(theirs), rel=1e-5)


def test_updates_equal_the_torch_trainers(family, masters_of, ragged_batch):
    # Of seed 0 one token has two experts whose logits are equal but for the order of a sum.
    masters = masters_of(family, 1)
    ours, theirs = megatron_trainer(family, masters), torch_trainer(family, masters)
    assert all(torch.equal(ours.masters[name], masters[name]) for name in masters)
    for _ in range(2):
        found, expected = (trainer.step(ragged_batch, TEMPERATURE, ()) for trainer in (ours, theirs))
        for name in (
            "loss",
            "grad_norm",
            "clip_fraction",
            "ratio_mean",
            "learning_rate",
            *(ROUTER if family.sparse_layers else ()),
        ):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-6), name
    # Adam turns the rounding of a gradient that is nearly zero into an update.
    assert largest(ours.masters, {name: tensor.detach() for name, tensor in theirs.masters.items()}) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "tied", "moe"])
def test_a_loaded_trainer_goes_on_bit_for_bit(name, architecture, masters_of, ragged_batch, tmp_path):
    arch = architecture(**FAMILIES[name])
    trainer = megatron_trainer(arch, masters_of(arch))
    trainer.step(ragged_batch, TEMPERATURE, ())
    trainer.save(tmp_path)
    digest, expected = trainer.digest(), trainer.step(ragged_batch, TEMPERATURE, ())
    other = megatron_trainer(arch, masters_of(arch, seed=1))
    other.load(tmp_path)
    assert (other.version, other.digest()) == (1, digest)
    assert other.step(ragged_batch, TEMPERATURE, ()) == expected
    assert other.digest() == trainer.digest() != digest


def test_an_update_that_is_not_finite_is_not_applied(architecture, masters_of, ragged_batch):
    trainer = megatron_trainer(architecture(), masters_of(architecture()))
    digest, broken = trainer.digest(), replace(ragged_batch, advantages=torch.full((24,), torch.inf))
    with pytest.raises(NotFiniteError, match=r"update 0 of policy 0: the loss is .*not applied"):
        trainer.step(broken, TEMPERATURE, ())
    assert (trainer.version, trainer.digest()) == (0, digest)
    fresh = megatron_trainer(architecture(), masters_of(architecture()))
    assert trainer.step(ragged_batch, TEMPERATURE, ()) == fresh.step(ragged_batch, TEMPERATURE, ())


@pytest.mark.parametrize("name", ["moe", "moe_unnormalised"])
def test_experts_of_the_rollout_are_replayed(name, architecture, masters_of, ragged_batch):
    arch = architecture(**FAMILIES[name])
    masters, sparse, sequences = masters_of(arch), len(arch.sparse_layers), ragged_batch.sequences
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(*sequences.tokens.shape, sparse, 4, generator=generator).argsort(-1)[..., :2].sort(-1).values
    own = sequences.tokens % 3 == 0
    experts = torch.where((own | ~sequences.valid)[..., None, None], -1, drawn).short()
    replayed = replace(ragged_batch, sequences=replace(sequences, experts=experts))
    ours, theirs = megatron_trainer(arch, masters), torch_trainer(arch, masters)
    found, expected = (t.logprobs(replayed.sequences, TEMPERATURE, ()).logprobs for t in (ours, theirs))
    free = ours.logprobs(sequences, TEMPERATURE, ()).logprobs
    mask = ragged_batch.policy_mask
    assert torch.allclose(found[mask], expected[mask], rtol=0, atol=1e-5)
    assert not torch.allclose(found[mask], free[mask], rtol=0, atol=1e-3)
    steps = [trainer.step(replayed, TEMPERATURE, ()) for trainer in (ours, theirs)]
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-5)


BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)


@pytest.mark.parametrize("points", ["stepwise", "native", "kernels", "fused"])
def test_routers_round_their_logits_where_the_contract_does(points, architecture, masters_of):
    arch, contract = architecture(**FAMILIES["moe"]), BF16.model_copy(update={"rounding_points": points})
    (router,) = megatron_trainer(arch, masters_of(arch), contract=contract)._policy.routers
    states = torch.randn(50, arch.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = router.gating(states)
    exact = states.double() @ router.weight.double().t()
    assert torch.allclose(logits.double(), exact, rtol=0.005, atol=1e-6)
    assert torch.equal(logits, logits.bfloat16().float()) == (points != "stepwise")


def test_of_equal_scores_the_lower_expert_is_taken(architecture, masters_of):
    arch = architecture(**FAMILIES["moe"])
    (router,) = megatron_trainer(arch, masters_of(arch))._policy.routers
    scores = torch.randint(0, 3, (200, 4), generator=torch.Generator().manual_seed(0)).float()
    found, indices = router.router_replay.get_replay_topk(scores, 2, None, None, None)
    assert torch.equal(indices, top_k(scores, 2))
    assert torch.equal(found, scores.gather(1, indices))
    _, chosen = router.routing(scores[:, None])
    assert torch.equal(chosen, torch.zeros(200, 4).scatter(1, indices, 1.0).bool())


def test_weights_in_bf16_have_masters_in_fp32(architecture, masters_of, ragged_batch, tmp_path):
    arch = architecture()
    trainer = megatron_trainer(arch, masters_of(arch), BF16)
    expected = megatron_trainer(arch, masters_of(arch)).logprobs(ragged_batch.sequences, TEMPERATURE, ())
    found = trainer.logprobs(ragged_batch.sequences, TEMPERATURE, ())
    assert float((found.logprobs - expected.logprobs)[ragged_batch.policy_mask].abs().mean()) < 0.05
    for _ in range(2):
        trainer.step(ragged_batch, TEMPERATURE, ())
    weights, masters = dict(trainer._policy.model.named_parameters()), trainer._optimiser.masters()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert all(torch.equal(masters[n].bfloat16().flatten(), w.detach().flatten()) for n, w in weights.items())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())
    reference = megatron_trainer(arch, masters_of(arch), BF16)
    first = {name: master.clone() for name, master in reference._optimiser.masters().items()}
    reference.mix(trainer, 0.6)
    mixed = {name: torch.tensor(0.4) * first[name] + torch.tensor(0.6) * masters[name] for name in first}
    assert all(torch.equal(master, mixed[name]) for name, master in reference._optimiser.masters().items())
    weights = reference._policy.model.named_parameters()
    assert all(torch.equal(mixed[n].bfloat16().flatten(), w.detach().flatten()) for n, w in weights), "passes read it"
    trainer.save(tmp_path)
    digest, after = trainer.digest(), trainer.step(ragged_batch, TEMPERATURE, ())
    other = megatron_trainer(arch, masters_of(arch, seed=1), BF16)
    other.load(tmp_path)
    assert other.digest() == digest
    assert other.step(ragged_batch, TEMPERATURE, ()) == after
