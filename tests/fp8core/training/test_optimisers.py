"""Optimisers: the bits of torch's AdamW, Muon against its formula and torch's own, and a state that goes on."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from fp8core.config.capability import Node
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import own_code
from fp8core.config.training import OptimiserConfig, TrainingConfig
from fp8core.errors import UserError
from fp8core.models.weights import is_linear
from fp8core.training.optimisers.muon import Muon, newton_schulz
from fp8core.training.optimisers.optimiser import Optimiser, Update
from fp8core.training.packed.trainer import InPlaceOptimiser
from fp8core.training.registry import trainer_of as registered_trainer

MUON = {"name": "muon", "weight_decay": 0.1}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_that_of_torch_to_the_bit(draw, weight_decay):
    """A tensor without a gradient, such as an expert that no token chose, keeps its value and has no state yet."""
    names, betas = ("matrix", "norm", "late"), (0.9, 0.95)
    ours, theirs = ({name: draw(8, 9, seed=i).float() for i, name in enumerate(names)} for _ in range(2))
    optimiser = Optimiser(OptimiserConfig(beta1=0.9, beta2=0.95, weight_decay=weight_decay), ours)
    expected = torch.optim.AdamW(theirs.values(), betas=betas, weight_decay=weight_decay)
    for update, with_gradients in enumerate((names[:2], names[:2], names, names[1:])):
        gradients = {name: draw(8, 9, seed=10 * update + i).float() for i, name in enumerate(names)}
        for name in names:
            theirs[name].grad = gradients[name].clone() if name in with_gradients else None
        expected.param_groups[0]["lr"] = 1e-3 * (update + 1)
        expected.step()
        optimiser.update({name: gradients[name] for name in with_gradients}, 1e-3 * (update + 1))
        assert all(torch.equal(ours[name], theirs[name]) for name in names)
        assert ("step/late" in optimiser.state) == (update >= 2)
    states = {f"{key}/{name}": value for name in names for key, value in expected.state[theirs[name]].items()}
    assert states.keys() == optimiser.state.keys()
    assert all(torch.equal(value, optimiser.state[key]) for key, value in states.items())


SHAPES = [(24, 24), (40, 16), (16, 40)]
RATE = 0.02


def gradients_of(shape, updates=3):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator) * 10.0 ** (i - 3) for i in range(updates)]


def by_muon(shape):
    master, moment = torch.ones(shape), torch.zeros(shape)
    for number, gradient in enumerate(gradients_of(shape), 1):
        Muon(0.95, 0.1).update(master, gradient, [moment], Update(number, RATE))
    return master


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_is_its_formula_in_double_precision(shape):
    """By singular values: the polynomial of each, and not of the matrix."""
    master, momentum = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients_of(shape):
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        left, values, right = torch.linalg.svd(0.95 * momentum + 0.05 * gradient.double(), full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        master *= 1 - RATE * 0.1
        master -= RATE * 0.2 * max(shape) ** 0.5 * (left @ values.diag() @ right)
    moved = (master - 1).norm()
    assert (by_muon(shape) - master).norm() < 5e-5 * moved


def test_an_update_has_the_same_bytes_for_any_number_of_threads():
    matrix, threads = torch.randn(33, 5001, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    try:
        updates = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            updates.append(newton_schulz(matrix))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], updates[2])
    assert not newton_schulz(torch.zeros(3, 4)).any()


def test_a_factor_clips_the_gradient():
    masters, moments = ([torch.zeros(8, 9) for _ in range(2)] for _ in range(2))
    gradient = gradients_of((8, 9))[0]
    Muon(0.95, 0.0).update(masters[0], gradient, moments[:1], Update(1, RATE, 0.5))
    Muon(0.95, 0.0).update(masters[1], 0.5 * gradient, moments[1:], Update(1, RATE))
    assert torch.equal(moments[0], moments[1])
    assert torch.equal(masters[0], masters[1])


@pytest.fixture
def learnt(trainer_of, architecture, first_scales, rollout_batch):
    """Settings to an exact trainer after two steps on one batch, and what it learns then."""
    contract = PrecisionContract()
    fresh = trainer_of(contract, architecture())
    scales = first_scales(fresh, contract).layers
    batch = rollout_batch(fresh, first_scales(fresh, contract))

    def learn(steps=2, **settings):
        trainer = trainer_of(contract, architecture(), TrainingConfig(**{"optimiser": MUON} | settings))
        for _ in range(steps):
            trainer.step(batch, 1.0, scales)
        return trainer, lambda other: other.step(batch, 1.0, scales)

    return learn


def test_matrices_of_layers_learn_by_muon_each_by_itself(learnt, tmp_path):
    trainer, _ = learnt()
    trainer.save(tmp_path)
    state = load_file(tmp_path / "optimiser.safetensors")
    for name, master in trainer.masters.items():
        moments = {key.partition("/")[0]: each for key, each in state.items() if key.partition("/")[2] == name}
        assert moments.pop("step") == 2
        expected = {"momentum"} if is_linear(name) else {"exp_avg", "exp_avg_sq"}
        assert moments.keys() == expected, name
        assert all(moment.shape == master.shape for moment in moments.values())


def test_adapters_learn_by_muon(learnt, tmp_path):
    trainer, _ = learnt(lora={"rank": 4})
    trainer.save(tmp_path)
    state = load_file(tmp_path / "optimiser.safetensors")
    assert {key.partition("/")[0] for key in state} == {"step", "momentum"}
    assert all(moment.any() for moment in state.values())


def test_a_trainer_goes_on_from_its_state(learnt, tmp_path):
    trainer, learn = learnt()
    trainer.save(tmp_path)
    other, _ = learnt(0)
    other.load(tmp_path)
    assert learn(other).digest == learn(trainer).digest == learnt(3)[0].digest()
    with pytest.raises(UserError, match=r"optimiser\.safetensors: tensor \S+: expected shape"):
        learnt(0, optimiser={"name": "adamw"})[0].load(tmp_path)


@pytest.mark.parametrize("settings", [MUON, {"weight_decay": 0.1}], ids=["muon", "adamw"])
def test_both_trainers_update_a_matrix_alike(settings):
    """The packed one, of a stack of matrices, by a factor; its AdamW is a kernel's."""
    name, gradient = "model.layers.0.self_attn.q_proj.weight", gradients_of((8, 9))[0]
    apart, stack = {name: torch.ones(8, 9)}, torch.ones(12, 9)
    Optimiser(OptimiserConfig(**settings), apart).update({name: gradient}, RATE)
    packed = InPlaceOptimiser(OptimiserConfig(**settings), {name: stack[2:10]}, {name: (8, 9)})
    packed.update({name: gradient}, RATE, 1.0)
    assert torch.allclose(stack[2:10], apart[name], rtol=1e-6, atol=0 if settings is MUON else 1e-7)
    assert (stack[[0, 1, 10, 11]] == 1).all()


@pytest.mark.parametrize("settings", [MUON, {"weight_decay": 0.1}], ids=["muon", "adamw"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_parts_of_a_stack_learn_as_if_each_were_alone(settings, neighbours):
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(3)]
    gradients = torch.randn(24, 9, generator=torch.Generator().manual_seed(0)).split(8)
    gradients = dict(zip(names, gradients if neighbours else [each.clone() for each in gradients], strict=True))
    apart, stack = {name: torch.ones(8, 9) for name in names}, torch.ones(24, 9)
    joined = dict(zip(names, stack.split(8), strict=True))
    for masters in (apart, joined):
        optimiser = InPlaceOptimiser(OptimiserConfig(**settings), masters, dict.fromkeys(names, (8, 9)))
        for _ in range(2):
            optimiser.update(gradients, RATE, 0.5)
    assert torch.equal(stack, torch.cat([*apart.values()]))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimiser": {"name": "moun"}}, "moun is none of adamw, muon"),
        ({"optimiser": MUON, "trainer": "megatron"}, "megatron, which has AdamW alone"),
        ({"optimiser": {"momentum": 0.99, "state": "bf16"}, "packed": True}, r"optimiser.momentum=0.99: a first mom"),
    ],
)
def test_what_is_not_computed_is_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        TrainingConfig(**settings)


def test_packed_ranks_refuse_rules_that_need_whole_matrices():
    settings = {"training.packed": True, "training.device": "cuda", "training.optimiser.name": "muon"}
    config = load_config("tiny", {**settings, "cluster.ranks": 2, "precision.rounding_points": "kernels"})
    node = Node(platform="sm_90", gpus=2)
    entry = registered_trainer(config.training)
    assert any("2 packed ranks has rows of a matrix" in line for line in entry.check(config, node))
    lora = config.training.model_copy(update={"lora": {"rank": 2}})
    assert not list(entry.check(config.model_copy(update={"training": lora}), node)), "every rank has all adapters"


def test_an_optimiser_of_the_users_own_needs_trust():
    assert not own_code(load_config("tiny", {"training.optimiser.name": "muon"}))
    config = load_config("tiny", {"training.optimiser.name": "lion:OPTIMISER"})
    assert own_code(config) == {"training.optimiser.name": "lion:OPTIMISER"}
