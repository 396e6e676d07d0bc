import json
import pickle
import re
import shutil
import subprocess
import sys
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
from fp8core.models.checkpoint import find_checkpoint, initial_weights, load_checkpoint, save_checkpoint
from fp8core.models.quantised_checkpoint import (
    CheckpointConversion,
    KeptInBf16,
    Selection,
    in_layer_order,
    plan_dequantisation,
    plan_quantisation,
    select,
    write_checkpoint,
)
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.recipe import FP32, POW2, Grouping

Shapes = dict[str, tuple[int, ...]]

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{i}.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]


def decoder(layers: int, linears: list[str], prefix: str = "model") -> Shapes:
    """Names of a decoder, each layer with the given linears, a router where there are experts, and norms."""
    shapes: Shapes = {
        f"{prefix}.embed_tokens.weight": (32, 8),
        "lm_head.weight": (32, 8),
        f"{prefix}.norm.weight": (8,),
    }
    for i in range(layers):
        layer = f"{prefix}.layers.{i}"
        shapes |= {f"{layer}.{linear}.weight": (8, 8) for linear in linears}
        shapes |= {f"{layer}.input_layernorm.weight": (8,), f"{layer}.self_attn.q_proj.bias": (8,)}
        if EXPERTS[0] in linears:
            shapes |= {f"{layer}.mlp.gate.weight": (2, 8), f"{layer}.mlp.shared_expert_gate.weight": (1, 8)}
    return shapes


def weights(layers: range, linears: list[str], prefix: str = "model") -> set[str]:
    return {f"{prefix}.layers.{i}.{linear}.weight" for i in layers for linear in linears}


def choose(shapes: Shapes, layers: int, first: int = 0, last: int = 0, names: tuple[str, ...] = ()) -> Selection:
    return select(shapes, layers, KeptInBf16(first, last, names))


def test_the_linears_of_a_dense_decoder():
    chosen = choose(decoder(12, ATTENTION + MLP), 12)
    assert chosen.quantised == weights(range(12), ATTENTION + MLP)
    assert chosen.kept_modules == ("lm_head",)
    assert chosen.unrecognised == ()


def test_a_head_that_shares_the_embedding_is_a_module_to_keep_all_the_same():
    shapes = decoder(1, ATTENTION)
    del shapes["lm_head.weight"]
    assert choose(shapes, 1).kept_modules == ("lm_head",)


def test_experts_are_quantised_and_their_routers_are_not():
    chosen = choose(decoder(2, ATTENTION + EXPERTS), 2)
    assert chosen.quantised == weights(range(2), ATTENTION + EXPERTS)
    routers = [f"model.layers.{i}.mlp.{name}" for i in range(2) for name in ("gate", "shared_expert_gate")]
    assert chosen.kept_modules == ("lm_head", *routers)
    assert chosen.unrecognised == ()


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model"])
def test_only_the_decoder_of_a_model_that_also_sees(prefix):
    tower = {"vision_tower.encoder.layers.0.self_attn.q_proj.weight": (8, 8)}
    chosen = choose(decoder(2, ATTENTION + MLP, prefix) | tower, 2)
    assert chosen.quantised == weights(range(2), ATTENTION + MLP, prefix)
    assert chosen.unrecognised == tuple(tower)
    assert "vision_tower.encoder.layers.0.self_attn.q_proj" in chosen.kept_modules


def test_matrices_of_unknown_names_stay_and_are_listed():
    unknown: Shapes = {
        "model.layers.0.linear_attn.in_proj.weight": (8, 8),
        "model.layers.0.conv1d.weight": (8, 1, 4),
        "model.layers.0.table": (8, 8),
        "model.layers.1.mlp.experts.gate_up_proj": (2, 8, 16),
    }
    chosen = choose(decoder(2, ATTENTION) | unknown, 2)
    assert set(chosen.unrecognised) == set(unknown)
    # A table directly in a layer is no module; naming its parent would keep the whole layer.
    assert chosen.kept_modules == (
        "lm_head",
        "model.layers.0.conv1d",
        "model.layers.0.linear_attn.in_proj",
        "model.layers.1.mlp.experts",
    )


def test_first_and_last_layers():
    chosen = choose(decoder(12, ATTENTION + EXPERTS), 12, first=1, last=2)
    assert chosen.quantised == weights(range(1, 10), ATTENTION + EXPERTS)
    kept = {f"model.layers.{i}.{module}" for i in (0, 10, 11) for module in [*ATTENTION, "mlp.experts"]}
    assert kept <= set(chosen.kept_modules)
    assert not any(module.startswith("model.layers.9.self_attn") for module in chosen.kept_modules)


def test_layers_beyond_the_decoder_are_not_its_last():
    chosen = choose(decoder(4, ATTENTION), 3, last=1)
    assert chosen.quantised == weights(range(2), ATTENTION) | weights(range(3, 4), ATTENTION)


@pytest.mark.parametrize("pattern", ["*.down_proj", "*.down_proj.weight", "model.layers.*.mlp.down*"])
def test_names_by_pattern_of_module_or_tensor(pattern):
    chosen = choose(decoder(3, ATTENTION + MLP), 3, names=(pattern,))
    assert chosen.quantised == weights(range(3), ATTENTION + MLP[:2])
    assert chosen.kept_modules == ("lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3)))


def test_a_pattern_may_match_what_stays_anyway():
    assert choose(decoder(1, ATTENTION), 1, names=("lm_head",)).quantised == weights(range(1), ATTENTION)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match=r"'\*\.dwon_proj' matches no tensor; names look like model\.embed_tokens"):
        choose(decoder(1, ATTENTION), 1, names=("*.dwon_proj",))


@pytest.mark.parametrize(
    ("pattern", "kept", "quantised"),
    [
        ("*.1.self_attn.k_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"),
        ("*.up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"),
        ("*.experts.1.*", "model.layers.0.mlp.experts.1.down_proj", "model.layers.0.mlp.experts.0.down_proj"),
        ("*.experts.*.down_proj", "model.layers.0.mlp.experts.0.down_proj", "model.layers.0.mlp.experts.0.gate_proj"),
    ],
)
def test_parts_of_what_engines_fuse_are_refused(pattern, kept, quantised):
    shapes = decoder(2, ATTENTION + (EXPERTS if "experts" in pattern else MLP))
    with pytest.raises(UserError) as refused:
        choose(shapes, 2, names=(pattern,))
    assert str(refused.value).startswith(f"{kept}.weight would stay in BF16 and {quantised}.weight would not")


@pytest.mark.parametrize("kept", [KeptInBf16(first_layers=1, last_layers=1), KeptInBf16(names=("*",))])
def test_nothing_left_to_quantise_is_refused(kept):
    with pytest.raises(UserError, match="nothing to quantise: 14 linear weights in 2 decoder layers"):
        select(decoder(2, ATTENTION + MLP), 2, kept)


def test_names_are_sorted_with_their_numbers_as_numbers():
    assert in_layer_order(["b.10", "b.9", "a", "b.9.c"]) == ["a", "b.9", "b.9.c", "b.10"]


UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def ignore(tensors: int, size: int) -> None:
    """Report to nobody."""


def write(plan: CheckpointConversion, target: Path, shard_bytes: int = 10**9) -> Path:
    write_checkpoint(plan, target, ignore, shard_bytes)
    return target


def quantise(source: Path, target: Path, tiles: Grouping = POW2.weights, **kept: Any) -> Path:
    return write(plan_quantisation(source, KeptInBf16(**kept), tiles), target)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.fixture
def broken(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint, to be spoilt."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "broken"))


@pytest.fixture(scope="module")
def quantised(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint in block FP8."""
    return quantise(small_checkpoint, tmp_path_factory.mktemp("quantised") / "checkpoint")


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that our decoder does not know: two layers with experts around a dense one, in FP32."""
    config = Qwen3MoeConfig(
        vocab_size=96,
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
    return folder


def test_another_process_reads_the_weights_of_codes_in_its_files(quantised):
    loaded = load_checkpoint(quantised)
    assert loaded.dequantised
    source = find_checkpoint(quantised).source()
    assert list(source) == list(loaded.tensors)
    for name, tensor in pickle.loads(pickle.dumps(source)).items():
        assert (tensor.dtype, torch.equal(tensor, loaded.tensors[name])) == (loaded.tensors[name].dtype, True), name


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**config_of(folder), **changes}))


def split(folder: Path, parts: int) -> None:
    """Deal the tensors of `model.safetensors` out to several files, neighbours to different ones."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file(dict(tensors[i::parts]), folder / file)
        weight_map.update(dict.fromkeys(dict(tensors[i::parts]), file))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("tiles", [POW2.weights, FP32.weights], ids=["pow2", "fp32"])
@pytest.mark.parametrize(("first", "formats"), [(0, ("fp8_block", "fp8_block")), (1, ("bf16", "fp8_block"))])
def test_the_bytes_are_those_that_are_shipped_to_an_engine(small_checkpoint, tmp_path, tiles, first, formats):
    folder = quantise(small_checkpoint, tmp_path / "fp8", tiles, first_layers=first)
    masters = {name: tensor.float() for name, tensor in load_checkpoint(small_checkpoint).tensors.items()}
    assert_equal(weights_of(folder), stored_weights(masters, StoredNames.by_layer(*formats), tiles))


def test_the_configuration_is_the_source_s_with_the_format(small_checkpoint, quantised):
    source, found = config_of(small_checkpoint), config_of(quantised)
    assert found.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert found == source
    assert list(found) == list(source)


def test_what_was_not_bf16_says_so_afterwards(small_checkpoint, broken, tmp_path):
    reconfigure(broken, dtype="float32", torch_dtype="float16", vision_config={"dtype": "float16", "depth": 2})
    rewrite(broken, **{name: tensor.float() for name, tensor in weights_of(small_checkpoint).items()})
    folder = quantise(broken, tmp_path / "fp8")
    config = config_of(folder)
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert config["vision_config"] == {"dtype": "bfloat16", "depth": 2}
    assert_equal(weights_of(folder), weights_of(quantise(small_checkpoint, tmp_path / "direct")))


def test_a_configuration_without_a_type_gets_one(broken, tmp_path):
    config = {key: value for key, value in config_of(broken).items() if "dtype" not in key}
    (broken / "config.json").write_text(json.dumps(config))
    assert config_of(quantise(broken, tmp_path / "fp8"))["torch_dtype"] == "bfloat16"


def test_fp32_beside_linears_in_bf16_is_left_alone(broken, tmp_path):
    correction = "model.layers.0.mlp.gate.e_score_correction_bias"
    rewrite(broken, **{correction: torch.tensor([1.0000001]), "model.ids": torch.tensor([2**40])})
    stored = weights_of(quantise(broken, tmp_path / "fp8"))
    assert stored[correction].item() == torch.tensor(1.0000001).item()
    assert stored["model.ids"].item() == 2**40


def test_fp16_becomes_bf16_beside_linears_in_bf16(broken, tmp_path):
    norm = "model.norm.weight"
    rewrite(broken, **{norm: torch.full((128,), 1.001, dtype=torch.float16)})
    assert torch.equal(weights_of(quantise(broken, tmp_path / "fp8"))[norm], torch.ones(128, dtype=torch.bfloat16))


@pytest.mark.parametrize("keep", [{}, {"first_layers": 1}, {"last_layers": 2}, {"names": ("*.self_attn.*_proj",)}])
def test_transformers_converts_the_modules_that_are_quantised(moe_checkpoint, tmp_path, keep):
    folder = quantise(moe_checkpoint, tmp_path / "fp8", **keep)
    config = AutoConfig.from_pretrained(folder)
    quantisation = FineGrainedFP8Config.from_dict(config.quantization_config)
    assert (quantisation.quant_method, quantisation.weight_block_size) == ("fp8", [128, 128])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    replace_with_fp8_linear(model, quantisation.modules_to_not_convert, quantisation, pre_quantized=True)
    converted = {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    codes = {name: t.shape for name, t in weights_of(folder).items() if t.dtype == torch.float8_e4m3fn}
    assert converted == {
        name.partition(".experts.")[0] + ".experts" if "experts" in name else name[:-7] for name in codes
    }
    parameters = dict(model.named_parameters())
    for name in codes.keys() & parameters.keys():
        scales = parameters[name + "_scale_inv"]
        assert weights_of(folder)[name + "_scale_inv"].shape == scales.shape
        assert scales.dtype == torch.float32


def test_a_model_that_our_decoder_does_not_know(moe_checkpoint, tmp_path):
    plan = plan_quantisation(moe_checkpoint, KeptInBf16(), POW2.weights)
    assert plan.unrecognised == ()
    folder = write(plan, tmp_path / "fp8")
    experts = [name for name in weights_of(folder) if ".experts." in name and name.endswith("_scale_inv")]
    assert len(experts) == 2 * 3 * 3
    assert weights_of(folder)["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    back = write(plan_dequantisation(folder), tmp_path / "bf16")
    model, report = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(moe_checkpoint)
    for (name, wide), narrow in zip(original.named_parameters(), model.parameters(), strict=True):
        assert (wide - narrow.float()).norm() <= 0.04 * wide.norm(), name


def test_there_and_back_gives_the_source_but_for_rounding(small_checkpoint, quantised, tmp_path):
    back = write(plan_dequantisation(quantised), tmp_path / "bf16")
    source, found = files_of(small_checkpoint), files_of(back)
    assert found.keys() == source.keys()
    assert {name for name in source if source[name] != found[name]} == {"model.safetensors"}
    plain = {name for name in weights_of(small_checkpoint) if not name.endswith("_proj.weight")}
    stored = weights_of(back)
    assert_equal({n: stored[n] for n in plain}, {n: t for n, t in weights_of(small_checkpoint).items() if n in plain})
    load_checkpoint(back)


@pytest.mark.parametrize("parts", [2, 5])
def test_the_division_into_files_changes_nothing(small_checkpoint, broken, tmp_path, parts):
    split(broken, parts)
    plans = [plan_quantisation(folder, KeptInBf16(), POW2.weights) for folder in (small_checkpoint, broken)]
    for limit in (10**9, 150_000):
        whole, divided = (write(plan, tmp_path / f"{limit}-{i}", limit) for i, plan in enumerate(plans))
        assert files_of(divided) == files_of(whole)


def test_large_checkpoints_are_written_in_several_files(small_checkpoint, quantised, tmp_path):
    plan = plan_quantisation(small_checkpoint, KeptInBf16(), POW2.weights)
    limit = 150_000
    folders = [write(plan, tmp_path / name, limit) for name in ("one", "two")]
    assert files_of(folders[0]) == files_of(folders[1])
    shards = sorted(folders[0].glob("*.safetensors"))
    index = json.loads((folders[0] / INDEX).read_text())
    assert [shard.name for shard in shards] == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, 5)]
    for shard in shards:
        tensors = load_file(shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
        assert {name for name, file in index["weight_map"].items() if file == shard.name} == tensors.keys()
    assert index["metadata"]["total_size"] == plan.size == sum(t.nbytes for t in weights_of(quantised).values())
    assert_equal(weights_of(folders[0]), weights_of(quantised))
    back = [write(plan_dequantisation(folder), tmp_path / f"{folder.name}-bf16") for folder in (folders[0], quantised)]
    assert files_of(back[0]) == files_of(back[1])


def test_every_other_file_is_copied_and_other_weights_are_named(broken, tmp_path):
    (broken / "additional").mkdir()
    (broken / ".cache").mkdir()
    content = {"LICENSE": b"free\r\n", "modeling_own.py": b"pass", "additional/tool.jinja": b"{{ x }}"}
    left_out = ["consolidated.pth", "model-00001-of-00002.safetensors"]
    for name, data in {**content, ".cache/lock": b"", ".gitattributes": b"", **dict.fromkeys(left_out, b"")}.items():
        (broken / name).write_bytes(data)
    (broken / "linked.txt").symlink_to(broken / "LICENSE")
    plan = plan_quantisation(broken, KeptInBf16(), POW2.weights)
    assert [str(path) for path in plan.left_out] == left_out
    found = files_of(write(plan, tmp_path / "fp8"))
    small = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    expected = content | {"linked.txt": b"free\r\n"} | {name: (broken / name).read_bytes() for name in small}
    assert {name: data for name, data in found.items() if name not in ("config.json", "model.safetensors")} == expected
    assert not (tmp_path / "fp8" / "linked.txt").is_symlink()


def test_progress_adds_up(small_checkpoint, tmp_path):
    plan = plan_quantisation(small_checkpoint, KeptInBf16(), POW2.weights)
    reports: list[tuple[int, int]] = []
    write_checkpoint(plan, tmp_path / "fp8", lambda *added: reports.append(added))
    assert [sum(column) for column in zip(*reports, strict=True)] == [len(plan.conversions), plan.size]
    assert plan.parameters == sum(tensor.numel() for tensor in weights_of(small_checkpoint).values())


def refusal(convert: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        convert()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: reconfigure(f, quantization_config={}), "config.json: quantization_config: the checkpoint is quan"),
        (lambda f: reconfigure(f, num_hidden_layers=None), "config.json: num_hidden_layers: found null, expected"),
        (lambda f: rewrite(f, x=torch.ones(2).double()), "model.safetensors: tensor x: expected BF16, F16, F32 or"),
        (lambda f: (f / "config.json").unlink(), "config.json: cannot be read"),
        (lambda f: shutil.rmtree(f), "no such folder"),
    ],
)
def test_a_source_that_cannot_be_quantised_is_refused(broken, spoil, message):
    spoil(broken)
    assert message in refusal(lambda: plan_quantisation(broken, KeptInBf16(), POW2.weights))


@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_nan_is_refused_by_name_and_leaves_nothing(broken, tmp_path, name):
    tensor = load_file(broken / "model.safetensors")[name]
    tensor.view(-1)[-1] = float("nan")
    rewrite(broken, **{name: tensor})
    message = refusal(lambda: quantise(broken, tmp_path / "out" / "fp8"))
    assert message == f"{broken / 'model.safetensors'}: tensor {name}: holds NaN or infinity in BF16"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_is_never_overwritten(small_checkpoint, tmp_path):
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "notes.txt").write_text("mine")
    assert refusal(lambda: quantise(small_checkpoint, tmp_path / "fp8")).endswith("a checkpoint is never overwritten")
    assert files_of(tmp_path) == {"fp8/notes.txt": b"mine"}


def test_an_interrupted_call_leaves_no_target_and_is_repeated(small_checkpoint, quantised, tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(tensors: int, size: int) -> None:
        if tensors:
            raise Interrupted

    plan = plan_quantisation(small_checkpoint, KeptInBf16(), POW2.weights)
    with pytest.raises(Interrupted):
        write_checkpoint(plan, tmp_path / "fp8", interrupt)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".fp8.partial").mkdir()
    (tmp_path / ".fp8.partial" / "left by a kill").touch()
    assert files_of(write(plan, tmp_path / "fp8")) == files_of(quantised)
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: reconfigure(f, quantization_config=None), "the checkpoint is not quantised"),
        (
            lambda f: reconfigure(f, quantization_config={**config_of(f)["quantization_config"], "fmt": "e5m2"}),
            'quantization_config: fmt: found "e5m2", expected "e4m3"',
        ),
        (
            lambda f: reconfigure(
                f, quantization_config={**config_of(f)["quantization_config"], "weight_block_size": [64, 64]}
            ),
            "quantization_config: weight_block_size: found [64, 64], expected [128, 128]",
        ),
        (lambda f: rewrite(f, **{UP + "_scale_inv": None}), f"tensor {UP}: its scales {UP}_scale_inv are nowhere"),
        (lambda f: rewrite(f, **{UP: None}), f"tensor {UP}_scale_inv: F32 without a place in a block-FP8 checkpoint"),
        (lambda f: rewrite(f, **{UP + "_scale_inv": torch.ones(3, 1)}), "expected floating-point [2, 1] for weights"),
    ],
)
def test_a_source_that_cannot_be_dequantised_is_refused(quantised, tmp_path, spoil, message):
    folder = Path(shutil.copytree(quantised, tmp_path / "broken"))
    spoil(folder)
    assert message in refusal(lambda: plan_dequantisation(folder))


MEASURE = """
import sys
from pathlib import Path
import torch
from fp8core.models.quantised_checkpoint import KeptInBf16
from fp8core.models.quantised_checkpoint import plan_dequantisation, plan_quantisation, write_checkpoint
from fp8core.numerics.recipe import POW2

def status(key):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
source, folder, again = map(Path, sys.argv[1:])
small = folder.parent / "small"
write_checkpoint(plan_quantisation(small, KeptInBf16(), POW2.weights), folder.parent / "warm", lambda *_: None)
write_checkpoint(plan_dequantisation(folder.parent / "warm"), folder.parent / "warm-bf16", lambda *_: None)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
write_checkpoint(plan_quantisation(source, KeptInBf16(), POW2.weights), folder, lambda *_: None)
write_checkpoint(plan_dequantisation(folder), again, lambda *_: None)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(small_checkpoint, tmp_path):
    shutil.copytree(small_checkpoint, tmp_path / "small")
    source = Path(shutil.copytree(small_checkpoint, tmp_path / "source"))
    largest = torch.ones(16_384, 1024, dtype=torch.bfloat16)
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.down_proj.weight" for i in range(4))]
    save_file({name: largest.clone() for name in names}, source / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, source, tmp_path / "fp8", tmp_path / "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * largest.nbytes


# Widths of SmolLM2-135M, 192 rows of K and V, and a last tile that is partial beside a whole one; then what loads.
@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, "down_proj.weight: [576, 256]"),
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 64}, "k_proj.weight: [192, 128]"),
        ({"intermediate_size": 320}, "down_proj.weight: [128, 320]"),
        ({"hidden_size": 80, "intermediate_size": 96}, None),
        ({"hidden_size": 256, "num_heads": 8, "num_kv_heads": 1}, None),
    ],
    ids=["SmolLM2", "K and V", "MLP", "narrow", "whole tiles"],
)
def test_what_is_written_is_what_transformers_reads_or_refused(small_checkpoint, tmp_path, sizes, refused):
    small = load_checkpoint(small_checkpoint)
    arch = replace(small.architecture, family="llama", qk_norm=False, **sizes)
    save_checkpoint(tmp_path / "bf16", arch, initial_weights(arch, 0), small.tokenizer)
    if refused is not None:
        with pytest.raises(UserError, match=re.escape(refused)):
            quantise(tmp_path / "bf16", tmp_path / "fp8")
        assert not (tmp_path / "fp8").exists()
        return
    write(plan_dequantisation(quantise(tmp_path / "bf16", tmp_path / "fp8")), tmp_path / "back")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8").state_dict()
    for name, tensor in weights_of(tmp_path / "back").items():
        assert torch.equal(loaded[name].bfloat16(), tensor), name


def test_a_checkpoint_in_block_fp8_is_read_as_what_its_codes_stand_for(quantised, tmp_path):
    """Qwen3-FP8 stores its scales in BF16, and names no format of its codes."""
    folder = shutil.copytree(quantised, tmp_path / "fp8")
    scales = {name: t.bfloat16() for name, t in weights_of(folder).items() if name.endswith("_scale_inv")}
    rewrite(folder, **scales)
    section = config_of(folder)["quantization_config"]
    reconfigure(folder, quantization_config={key: value for key, value in section.items() if key != "fmt"})
    found = load_checkpoint(folder)
    expected = load_checkpoint(write(plan_dequantisation(quantised), tmp_path / "back"))
    assert found.architecture == expected.architecture
    assert found.dequantised == {name.removesuffix("_scale_inv") for name in scales}
    assert not expected.dequantised
    assert list(found.tensors) == list(expected.tensors)
    assert_equal(found.tensors, expected.tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale_inv": None}, "expected dtype BF16, F16, F32, found F8_E4M3"),
        ({"_scale_inv": torch.ones(3, 1)}, "expected floating-point [2, 1] for weights [256, 128], found F32 [3, 1]"),
        ({"_scale_inv": torch.full((2, 1), torch.nan)}, "a scale is not positive and finite"),
    ],
    ids=["no scales", "other tiles", "NaN"],
)
def test_codes_and_scales_that_do_not_belong_together_are_refused(quantised, tmp_path, changes, message):
    folder, up = shutil.copytree(quantised, tmp_path / "fp8"), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, **{up + suffix: tensor for suffix, tensor in changes.items()})
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_checkpoint(folder)
    assert f"tensor {up}" in str(refused.value)
