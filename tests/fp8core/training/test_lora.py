"""Trainers of adapters: an ordinary policy, whose frozen part nothing moves."""

import pytest
import torch
from safetensors.torch import load_file

from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import LoraConfig, TrainingConfig
from fp8core.errors import StoredFileError, UserError, refuse
from fp8core.models.hub import model_shape
from fp8core.training.lora import adapter_refusals, adapter_shapes

FP8 = PrecisionContract(rounding_points="kernels")
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"),
    training=TrainingPrecision(linear="bf16", kv_cache="bf16"),
    rounding_points="kernels",
)
LORA = LoraConfig(rank=3, alpha=7.0, targets=["q_proj", "o_proj", "up_proj", "down_proj"])
# With beta1 = 0 and no clipping the first moment of AdamW is the gradient.
BARE = {"optimiser": {"beta1": 0.0}, "max_grad_norm": 1e9, "learning_rate": 0.01, "warmup_steps": 0}


@pytest.fixture(params=["exact", "packed"])
def make(request, trainer_of, packed_of):
    """(contract, architecture, lora, masters) to a trainer."""
    build, size = {"exact": (trainer_of, {"micro_batch": 4}), "packed": (packed_of, {"tokens_per_pass": 128})}[
        request.param
    ]

    def trainer(contract, arch, lora=LORA, masters=None):
        return build(contract, arch, TrainingConfig(lora=lora, **size, **BARE), masters=masters)

    return trainer


@pytest.fixture(params=[FP8, BF16], ids=["fp8", "bf16"])
def contract(request):
    return request.param


def read(path):
    """The tensors of a file, which the next save may overwrite in place."""
    return whole(load_file(path))


def whole(masters):
    return {name: tensor.detach().clone() for name, tensor in masters.items()}


def test_the_gradients_are_those_of_all_weights_through_the_merge(
    make, contract, architecture, batch_of, tmp_path
) -> None:
    """The second update: B is not 0 any more."""
    arch = architecture()
    batch, scales = batch_of(contract, arch)
    trainer = make(contract, arch)
    trainer.step(batch, 1.0, scales)
    trainer.save(tmp_path)
    adapters = read(tmp_path / "masters.safetensors")
    full = make(contract, arch, lora=None, masters=whole(trainer.masters))
    assert trainer.export().digest() == full.export().digest()
    scores = [each.logprobs(batch.sequences, 1.0, scales).logprobs.nan_to_num() for each in (trainer, full)]
    assert torch.equal(*scores)
    found, gradients = moments(trainer, batch, scales, tmp_path), moments(full, batch, scales, tmp_path)
    assert found.keys() == adapters.keys() == adapter_shapes(shapes(full.masters), LORA).keys()
    for module in {name.rpartition(".lora_")[0] for name in adapters}:
        left, right = (adapters[f"{module}.lora_{side}.weight"].double().requires_grad_() for side in "BA")
        ((left @ right) * (LORA.alpha / LORA.rank)).backward(gradients[f"{module}.weight"].double())
        for side, expected in (("B", left.grad), ("A", right.grad)):
            assert expected.norm() > 0
            of_adapter = found[f"{module}.lora_{side}.weight"].double()
            assert (of_adapter - expected).norm() < 1e-5 * expected.norm(), module


def moments(trainer, batch, scales, folder):
    """The gradient of one update."""
    trainer.step(batch, 1.0, scales)
    trainer.save(folder)
    stored = read(folder / "optimiser.safetensors")
    return {name.removeprefix("exp_avg/"): each for name, each in stored.items() if name.startswith("exp_avg/")}


def shapes(masters):
    return {name: tuple(tensor.shape) for name, tensor in masters.items()}


def test_a_restored_trainer_goes_on_bit_for_bit(make, contract, architecture, batch_of, masters_of, tmp_path) -> None:
    arch = architecture()
    batch, scales = batch_of(contract, arch)
    trainer = make(contract, arch)
    trainer.step(batch, 1.0, scales)
    trainer.save(tmp_path)
    restored = make(contract, arch)
    restored.load(tmp_path)
    assert (restored.version, restored.digest()) == (1, trainer.digest())
    assert restored.step(batch, 1.0, scales) == trainer.step(batch, 1.0, scales)
    with pytest.raises(StoredFileError, match="base: "):
        make(contract, arch, masters=masters_of(arch, 1)).load(tmp_path)
    with pytest.raises(StoredFileError, match="nothing frozen"):
        make(contract, arch, lora=None).load(tmp_path)


def test_a_rank_beyond_a_side_and_experts_are_refused(architecture) -> None:
    refuse(adapter_refusals(architecture(), LoraConfig(rank=48)))
    with pytest.raises(UserError, match=r"rank=49: .*k_proj.weight is \[48, 80\]; lower it to 48"):
        refuse(adapter_refusals(architecture(), LoraConfig(rank=49)))
    refuse(adapter_refusals(architecture(), LoraConfig(rank=49, targets=["up_proj"])))
    experts = model_shape(load_config("tiny-moe"))
    with pytest.raises(UserError, match=r"training\.lora: the model has experts"):
        refuse(adapter_refusals(experts, LORA))
    refuse(adapter_refusals(experts, None))
    with pytest.raises(ValueError, match="megatron"):
        TrainingConfig(trainer="megatron", lora=LORA)
