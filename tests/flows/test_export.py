"""`fp8-grpo export`: folders that transformers loads, with a note of where they come from."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flows.cli import main
from fp8core.models.checkpoint import find_checkpoint, write_fp8_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.recipe import POW2

PROMPT = "2*7*6+0+9="


@pytest.fixture
def export(capsys):
    """Run the command; returns exit code, stdout and stderr."""

    def command(*arguments):
        code = main(["export", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def origin(folder):
    return json.loads((folder / "fp8_grpo.json").read_text())


@pytest.fixture(scope="module")
def wide(loop_run):
    """A run whose every linear has whole tiles of 128, as others demand of block FP8."""
    return loop_run("wide", steps=1, **{"architecture.num_kv_heads": 4})


@torch.no_grad()
def our_logits(folder, tokens):
    """What our decoder computes in FP32 from the weights of a folder."""
    stored = find_checkpoint(folder)
    decoder = Decoder(stored.architecture, reference_formats(stored.architecture.num_layers))
    masters = {name: tensor.float() for name, tensor in stored.source().items()}
    weights = load_policy(stored.architecture, stored_weights(masters, decoder.formats.stored_names(), POW2.weights))
    context = FullContext.of(torch.ones(tokens.shape, dtype=torch.bool))
    hidden = decoder.hidden(weights, tokens, torch.arange(tokens.shape[1])[None], context, ())
    return decoder.formats.head.logits(hidden.flatten(0, 1), weights.head)


@torch.no_grad()
def logits_of(folder):
    """Tokens of a prompt, and what transformers computes in FP32 from the weights of a folder."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]])
    assert len(PROMPT) == tokens.numel()
    return tokens, model.float()(tokens).logits.flatten(0, 1)


def test_a_checkpoint_is_copied_and_loads_in_transformers(whole_run, export, tmp_path):
    code, printed, errors = export(whole_run.folder, tmp_path / "bf16", "--step", 4)
    assert (code, errors) == (0, "")
    assert printed.splitlines() == [f"{tmp_path / 'bf16'}: the policy after step 4 of whole in bf16"]
    stored = whole_run.folder / "checkpoints" / "00004" / "policy"
    for path in stored.iterdir():
        assert (tmp_path / "bf16" / path.name).read_bytes() == path.read_bytes()
    record = whole_run.records[4]
    written = origin(tmp_path / "bf16")
    assert written.pop("run_id")
    assert written == {
        "format": "bf16",
        "run": "whole",
        "step": 4,
        "weights_digest": record["weights_digest"],
        "config_digest": record["config_digest"],
        "code_version": record["code_version"],
    }
    tokens, logits = logits_of(tmp_path / "bf16")
    torch.testing.assert_close(logits, our_logits(tmp_path / "bf16", tokens), rtol=0, atol=1e-4)


def test_block_fp8_is_what_the_library_writes_and_others_read(wide, export, tmp_path):
    code, printed, _ = export(wide.folder, tmp_path / "fp8", "--step", 1, "--format", "fp8")
    assert code == 0
    assert printed.startswith(f"{tmp_path / 'fp8'}: the policy after step 1 of wide in fp8\n")
    policy = wide.folder / "checkpoints" / "00001" / "policy"
    write_fp8_checkpoint(policy, tmp_path / "same", POW2.weights)
    for path in (tmp_path / "same").iterdir():
        assert (tmp_path / "fp8" / path.name).read_bytes() == path.read_bytes()
    assert origin(tmp_path / "fp8")["format"] == "fp8"
    quantisation = AutoConfig.from_pretrained(tmp_path / "fp8").quantization_config
    assert (quantisation["quant_method"], quantisation["weight_block_size"]) == ("fp8", [128, 128])
    (_, exact), (_, quantised) = logits_of(policy), logits_of(tmp_path / "fp8")
    assert 0 < (exact - quantised).norm() < 0.05 * exact.norm()


def test_adapters_are_written_as_peft_names_them(adapted, export, tmp_path):
    """Over the policy after step 0 they give the exported policy."""
    step = 3
    for name, of, form in (("base", 0, "bf16"), ("merged", step, "bf16"), ("adapter", step, "peft")):
        code, printed, errors = export(adapted.folder, tmp_path / name, "--step", of, "--format", form)
        assert code == 0, errors
    assert printed.startswith(f"{tmp_path / 'adapter'}: the policy after step {step} of adapted in peft, over the exp")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 2, 5.0)
    assert described["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert origin(tmp_path / "adapter")["format"] == "peft"
    assert origin(tmp_path / "adapter")["weights_digest"] == adapted.records[step]["weights_digest"]
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    moved = 0
    for name, tensor in merged.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        weight = base[name].double()
        if name.split(".")[-2] in described["target_modules"]:
            left, right = (adapters.pop(f"{module}.lora_{side}.weight").double() for side in "BA")
            weight += left @ right * (5.0 / 2)
            moved += int((tensor != base[name]).sum())
        assert torch.equal(weight.float().bfloat16(), tensor), name
    assert not adapters
    assert moved > 0
