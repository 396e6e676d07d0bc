"""Checkpoints in block FP8, against transformers, the numerics and what an engine is shipped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

from fp8core.errors import UserError
from fp8core.models.checkpoint import find_checkpoint, initial_weights, save_checkpoint, write_fp8_checkpoint
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.recipe import FP32, POW2, Grouping

TILES = [POW2.weights, FP32.weights]


def equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def quantise(source: Path, target: Path, tiles: Grouping = POW2.weights, **ends: int) -> Path:
    write_fp8_checkpoint(source, target, tiles, **ends)
    return target


def in_bf16(folder: Path) -> dict[str, Tensor]:
    """Codes times the scales of their tiles, rounded once, and everything else."""
    tensors, found = weights_of(folder), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (scales := tensors.get(name + "_scale_inv")) is not None:
            factors = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            found[name] = (tensor.float() * factors).bfloat16()
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert equal(tensor, right[name]), name


def refusal(convert: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        convert()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Tokenizer) -> Path:
    """Two layers with experts around a dense one, in FP32."""
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=3,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        mlp_only_layers=[1],
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("moe") / "checkpoint"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    bpe_tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("tiles", TILES, ids=["pow2", "fp32"])
@pytest.mark.parametrize(("first", "formats"), [(0, ("fp8_block", "fp8_block")), (1, ("bf16", "fp8_block"))])
def test_the_bytes_are_those_that_are_shipped_to_an_engine(small_checkpoint, tmp_path, tiles, first, formats):
    folder = quantise(small_checkpoint, tmp_path / "fp8", tiles, first_layers=first)
    masters = {name: tensor.float() for name, tensor in find_checkpoint(small_checkpoint).source().items()}
    assert_equal(weights_of(folder), stored_weights(masters, StoredNames.by_layer(*formats), tiles))


@pytest.mark.parametrize("keep", [{}, {"first_layers": 1}])
def test_transformers_converts_the_modules_that_are_quantised(moe_checkpoint, tmp_path, keep):
    folder = quantise(moe_checkpoint, tmp_path / "fp8", **keep)
    config = AutoConfig.from_pretrained(folder)
    quantisation = FineGrainedFP8Config.from_dict(config.quantization_config)
    assert (quantisation.quant_method, quantisation.weight_block_size) == ("fp8", [128, 128])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    replace_with_fp8_linear(model, quantisation.modules_to_not_convert, quantisation, pre_quantized=True)
    converted = {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    codes = {name for name, t in weights_of(folder).items() if t.dtype == torch.float8_e4m3fn}
    assert converted == {
        name.partition(".experts.")[0] + ".experts" if "experts" in name else name[:-7] for name in codes
    }


def test_what_is_quantised_already_is_refused(small_checkpoint, tmp_path):
    quantised = quantise(small_checkpoint, tmp_path / "once")
    assert "take the checkpoint in BF16" in refusal(lambda: quantise(quantised, tmp_path / "twice"))


# Widths of SmolLM2-135M, whose last tile is partial beside whole ones; then what loads.
@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, "down_proj.weight: [576, 256]"),
        ({"hidden_size": 80, "intermediate_size": 96}, None),
        ({"hidden_size": 256, "num_heads": 8, "num_kv_heads": 1}, None),
    ],
    ids=["SmolLM2", "narrow", "whole tiles"],
)
def test_what_is_written_is_what_transformers_reads_or_refused(small_checkpoint, tmp_path, sizes, refused):
    small = find_checkpoint(small_checkpoint)
    arch = replace(small.architecture, family="llama", **sizes)
    save_checkpoint(tmp_path / "bf16", arch, initial_weights(arch, 0), small.tokenizer)
    if refused is not None:
        assert refused in refusal(lambda: quantise(tmp_path / "bf16", tmp_path / "fp8"))
        return
    loaded = AutoModelForCausalLM.from_pretrained(quantise(tmp_path / "bf16", tmp_path / "fp8")).state_dict()
    for name, tensor in in_bf16(tmp_path / "fp8").items():
        assert torch.equal(loaded[name].bfloat16(), tensor), name
