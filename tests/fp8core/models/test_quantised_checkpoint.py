"""Checkpoints in block FP8 and back, against transformers, the numerics and what an engine is shipped."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

from fp8core.errors import UserError
from fp8core.models.checkpoint import Dequantised, find_checkpoint, initial_weights, load_checkpoint, save_checkpoint
from fp8core.models.quantised_checkpoint import Quantisation, plan_quantisation, write_checkpoint
from fp8core.models.safetensors_files import StoredTensor, read_header
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.recipe import FP32, POW2, Grouping

UP = "model.layers.1.mlp.up_proj.weight"
TILES = [POW2.weights, FP32.weights]


def stored(folder: Path, **tensors: Tensor) -> dict[str, StoredTensor]:
    save_file(tensors, folder / "file.safetensors")
    return read_header(folder / "file.safetensors")


def equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def dequantised(folder: Path, codes: Tensor, scales: Tensor) -> Tensor:
    both = stored(folder, w=codes, w_scale_inv=scales)
    return Dequantised(both["w"], both["w_scale_inv"]).whole()


@pytest.mark.parametrize(
    ("code", "scales", "line"),
    [
        (0, torch.tensor([[1.0, 1], [1, 0]]), "tensor w_scale_inv: a scale is not positive and finite"),
        (0, torch.tensor([[1.0, 1], [1, torch.nan]]), "tensor w_scale_inv: a scale is not positive and finite"),
        (0, torch.ones(2, 1), r"tensor w_scale_inv: expected floating-point \[2, 2\] for weights"),
        (0, torch.ones(2, 2, dtype=torch.int32), r"tensor w_scale_inv: expected floating-point \[2, 2\] for weights"),
        (0x7F, torch.ones(2, 2), "tensor w: holds NaN, or values beyond BF16"),
        (0x7E, torch.full((2, 2), 2.0**120), "tensor w: holds NaN, or values beyond BF16"),
    ],
)
def test_codes_and_scales_without_values_are_refused(tmp_path, code, scales, line):
    codes = torch.zeros(130, 130, dtype=torch.uint8)
    codes[129, 129] = code
    with pytest.raises(UserError, match=line):
        dequantised(tmp_path, codes.view(torch.float8_e4m3fn), scales)


# A folder


def write(plan: Quantisation, target: Path) -> Path:
    write_checkpoint(plan, target, lambda size: None)
    return target


def quantise(source: Path, target: Path, tiles: Grouping = POW2.weights, **ends: int) -> Path:
    return write(plan_quantisation(source, tiles, **ends), target)


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert equal(tensor, right[name]), name


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**config_of(folder), **changes}))


def refusal(convert: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        convert()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def broken(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint, to be spoilt."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "broken"))


@pytest.fixture(scope="module")
def quantised(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint in block FP8."""
    return quantise(small_checkpoint, tmp_path_factory.mktemp("quantised") / "checkpoint")


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Tokenizer) -> Path:
    """Two layers with experts around a dense one, in FP32 and in several files."""
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
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="500KB")
    bpe_tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("tiles", TILES, ids=["pow2", "fp32"])
@pytest.mark.parametrize(("first", "formats"), [(0, ("fp8_block", "fp8_block")), (1, ("bf16", "fp8_block"))])
def test_the_bytes_are_those_that_are_shipped_to_an_engine(small_checkpoint, tmp_path, tiles, first, formats):
    folder = quantise(small_checkpoint, tmp_path / "fp8", tiles, first_layers=first)
    masters = {name: tensor.float() for name, tensor in load_checkpoint(small_checkpoint).tensors.items()}
    assert_equal(weights_of(folder), stored_weights(masters, StoredNames.by_layer(*formats), tiles))


def test_the_configuration_is_the_source_s_with_the_format(small_checkpoint, broken, tmp_path):
    reconfigure(broken, dtype="float32", torch_dtype="float16", other={"depth": 2})
    rewrite(broken, **{name: tensor.float() for name, tensor in weights_of(small_checkpoint).items()})
    folder = quantise(broken, tmp_path / "fp8")
    found = config_of(folder)
    assert found.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    types = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "other": {"depth": 2}}
    assert found == config_of(small_checkpoint) | types
    assert_equal(weights_of(folder), weights_of(quantise(small_checkpoint, tmp_path / "direct")))


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


def test_every_other_file_is_copied_but_for_other_weights(broken, tmp_path):
    (broken / "additional").mkdir()
    content = {"LICENSE": b"free\r\n", "modeling_own.py": b"pass", "additional/tool.jinja": b"{{ x }}"}
    left_out = ["consolidated.pth", "model-00001-of-00002.safetensors"]
    for name, data in {**content, ".gitattributes": b"", **dict.fromkeys(left_out, b"")}.items():
        (broken / name).write_bytes(data)
    found = files_of(quantise(broken, tmp_path / "fp8"))
    small = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    expected = content | {name: (broken / name).read_bytes() for name in small}
    assert {name: data for name, data in found.items() if name not in ("config.json", "model.safetensors")} == expected


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda f: rewrite(f, **{UP: torch.full((256, 128), torch.nan)}), f"tensor {UP}: holds NaN or infinity in BF"),
        (lambda f: (f / "config.json").unlink(), "config.json: cannot be read"),
        (lambda f: shutil.rmtree(f), "no such folder"),
    ],
)
def test_a_source_that_cannot_be_quantised_is_refused_and_leaves_nothing(broken, tmp_path, spoil, line):
    spoil(broken)
    assert line in refusal(lambda: quantise(broken, tmp_path / "fp8"))
    assert not any("fp8" in path.name for path in tmp_path.iterdir())


def test_what_is_quantised_already_is_refused(quantised, tmp_path):
    assert "the checkpoint is quantised already" in refusal(lambda: quantise(quantised, tmp_path / "twice"))


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
    small = load_checkpoint(small_checkpoint)
    arch = replace(small.architecture, family="llama", qk_norm=False, **sizes)
    save_checkpoint(tmp_path / "bf16", arch, initial_weights(arch, 0), small.tokenizer)
    if refused is not None:
        assert refused in refusal(lambda: quantise(tmp_path / "bf16", tmp_path / "fp8"))
        return
    loaded = AutoModelForCausalLM.from_pretrained(quantise(tmp_path / "bf16", tmp_path / "fp8")).state_dict()
    for name, tensor in in_bf16(tmp_path / "fp8").items():
        assert torch.equal(loaded[name].bfloat16(), tensor), name


def test_a_checkpoint_in_block_fp8_is_read_as_what_its_codes_stand_for(quantised, tmp_path):
    """Qwen3-FP8 stores its scales in BF16, and names no format of its codes. Another process reads the same."""
    folder = Path(shutil.copytree(quantised, tmp_path / "fp8"))
    scales = {name: t.bfloat16() for name, t in weights_of(folder).items() if name.endswith("_scale_inv")}
    rewrite(folder, **scales)
    section = config_of(folder)["quantization_config"]
    reconfigure(folder, quantization_config={key: value for key, value in section.items() if key != "fmt"})
    found = load_checkpoint(folder)
    assert found.dequantised == {name.removesuffix("_scale_inv") for name in scales}
    assert_equal(dict(found.tensors), in_bf16(folder))
    elsewhere = pickle.loads(pickle.dumps(find_checkpoint(folder).source()))
    assert list(elsewhere) == list(found.tensors)
    assert_equal(dict(elsewhere), dict(found.tensors))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"_scale_inv": None}, "expected dtype BF16, F16, F32, found F8_E4M3"),
        ({"_scale_inv": torch.full((2, 1), torch.nan)}, "a scale is not positive and finite"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_not_loaded(quantised, tmp_path, changes, line):
    folder = Path(shutil.copytree(quantised, tmp_path / "fp8"))
    rewrite(folder, **{UP + suffix: tensor for suffix, tensor in changes.items()})
    assert line in (message := refusal(lambda: load_checkpoint(folder)))
    assert f"tensor {UP}" in message
