"""`fp8-grpo export`: folders that transformers loads, with a note of where they come from and a link in MLflow."""

import json

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flows.cli import main
from flows.tracking.record import TrackingRecord, write_record
from fp8core.config.load import load_config
from fp8core.durable import folder_digest
from fp8core.models.checkpoint import load_checkpoint, save_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.quantised_checkpoint import KeptInBf16, plan_dequantisation, plan_quantisation, write_checkpoint
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.recipe import POW2
from fp8core.run.build import build_base

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
    stored = load_checkpoint(folder)
    decoder = Decoder(stored.architecture, reference_formats(stored.architecture.num_layers))
    masters = {name: tensor.float() for name, tensor in stored.tensors.items()}
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
    assert printed.splitlines() == [
        f"{tmp_path / 'bf16'}: the policy after step 4 of whole in bf16",
        "the run was never tracked in MLflow: the export is not linked",
    ]
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
        "mlflow_run_id": None,
        "mlflow_model_id": None,
    }
    tokens, logits = logits_of(tmp_path / "bf16")
    torch.testing.assert_close(logits, our_logits(tmp_path / "bf16", tokens), rtol=0, atol=1e-4)


def test_block_fp8_is_what_quantise_writes_and_others_read(wide, export, tmp_path):
    code, printed, _ = export(wide.folder, tmp_path / "fp8", "--step", 1, "--format", "fp8")
    assert code == 0
    assert printed.startswith(f"{tmp_path / 'fp8'}: the policy after step 1 of wide in fp8\n")
    policy = wide.folder / "checkpoints" / "00001" / "policy"
    write_checkpoint(plan_quantisation(policy, KeptInBf16(), POW2.weights), tmp_path / "same", lambda *_: None)
    for path in (tmp_path / "same").iterdir():
        assert (tmp_path / "fp8" / path.name).read_bytes() == path.read_bytes()
    assert origin(tmp_path / "fp8")["format"] == "fp8"
    quantisation = AutoConfig.from_pretrained(tmp_path / "fp8").quantization_config
    assert (quantisation["quant_method"], quantisation["weight_block_size"]) == ("fp8", [128, 128])
    write_checkpoint(plan_dequantisation(tmp_path / "fp8"), tmp_path / "back", lambda *_: None)
    (_, exact), (_, quantised) = logits_of(policy), logits_of(tmp_path / "back")
    assert 0 < (exact - quantised).norm() < 0.05 * exact.norm()


def test_block_fp8_that_nobody_reads_is_refused_and_bf16_is_written(loop_run, export, tmp_path):
    widths = {"architecture.hidden_size": 192, "architecture.num_heads": 6, "architecture.intermediate_size": 320}
    partial = loop_run("partial", steps=1, **widths)
    metrics = partial.store.get_json(partial.ledger.artifacts(1)["metrics"])
    assert metrics["alignment/token_mult_prob_error"] == 1
    code, printed, errors = export(partial.folder, tmp_path / "fp8", "--step", 1, "--format", "fp8")
    assert (code, printed) == (2, "")
    assert "tensor model.layers.0.mlp.down_proj.weight: [192, 320]" in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert export(partial.folder, tmp_path / "bf16", "--step", 1)[0] == 0
    tokens, logits = logits_of(tmp_path / "bf16")
    torch.testing.assert_close(logits, our_logits(tmp_path / "bf16", tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("step", [3, 4])
def test_adapters_are_written_as_peft_names_them(adapted, export, tmp_path, step):
    """Over the policy after step 0 they give the exported policy, of a checkpoint and of a step without one."""
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


@pytest.mark.parametrize(("linear", "warmed", "named"), [("fp8_block", False, True), ("bf16", True, False)])
def test_adapters_name_the_model_as_their_base_where_the_policy_after_step_0_equals_it(
    loop_run, export, tmp_path, linear, warmed, named
):
    """A warm start trains it."""
    model = tmp_path / "model"
    base = build_base(load_config("tiny", {"architecture.num_layers": 2}))
    save_checkpoint(model, base.arch, base.tensors, base.tokenizer)
    (tmp_path / "own.jsonl").write_text('{"question": "1+2=", "completion": "3"}\n' * 4)
    warm = {"demonstrations": str(tmp_path / "own.jsonl"), "steps": 2} if warmed else None
    settings = {"model": str(model), "architecture": None, "warm_start": warm, "training.lora": {"rank": 2}}
    formats = {f"precision.{side}.linear": linear for side in ("rollout", "training")}
    run = loop_run("based", steps=1, **settings, **formats)
    for name, of, form in (("start", 0, "bf16"), ("adapter", 1, "peft")):
        assert export(run.folder, tmp_path / name, "--step", of, "--format", form)[0] == 0
    start, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "start", model))
    assert all(torch.equal(start[name], tensor) for name, tensor in given.items()) == named
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == (str(model) if named else None)


def test_a_run_without_adapters_has_none_to_export(whole_run, export, tmp_path):
    code, printed, errors = export(whole_run.folder, tmp_path / "adapter", "--step", 3, "--format", "peft")
    assert (code, printed, len(errors.splitlines())) == (2, "", 1)
    assert "training.lora" in errors
    assert not list(tmp_path.iterdir())


def test_transformers_loads_block_fp8_itself(wide, export, tmp_path):
    export(wide.folder, tmp_path / "fp8", "--step", 1, "--format", "fp8")
    (_, exact), (_, loaded) = logits_of(wide.folder / "checkpoints" / "00001" / "policy"), logits_of(tmp_path / "fp8")
    assert (exact - loaded).norm() < 0.05 * exact.norm()


def test_a_step_without_a_checkpoint_is_restored(whole_run, export, tmp_path):
    code, _, errors = export(whole_run.folder, tmp_path / "bf16", "--step", 3)
    assert (code, errors) == (0, "")
    assert origin(tmp_path / "bf16")["weights_digest"] == whole_run.records[3]["weights_digest"]
    exported = load_checkpoint(tmp_path / "bf16")
    earlier, later = (
        load_file(whole_run.folder / "checkpoints" / step / "masters.safetensors") for step in ("00002", "00004")
    )
    head = exported.tensors["lm_head.weight"]
    assert not torch.equal(head, earlier["lm_head.weight"].bfloat16())
    assert not torch.equal(head, later["lm_head.weight"].bfloat16())


def test_a_damaged_checkpoint_is_not_exported_but_restored(run_copy, whole_run, export, tmp_path):
    weights = run_copy.folder / "checkpoints" / "00004" / "policy" / "model.safetensors"
    held = weights.read_bytes()
    weights.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    code, _, errors = export(run_copy.folder, tmp_path / "bf16", "--step", 4)
    assert code == 0
    assert "00004: the checkpoint is damaged" in errors
    assert (tmp_path / "bf16" / "model.safetensors").read_bytes() == held
    assert origin(tmp_path / "bf16")["weights_digest"] == whole_run.records[4]["weights_digest"]


def test_exchanged_weights_are_not_exported_though_the_ledger_has_the_digest_of_their_folder(
    run_copy, export, tmp_path
):
    checkpoint = run_copy.folder / "checkpoints" / "00004"

    def exported(damaged, factor, **sealed):
        tensors = {name: factor * tensor for name, tensor in load_file(checkpoint / damaged).items()}
        save_file(tensors, checkpoint / damaged, metadata={"format": "pt"})
        sealed["digest"] = folder_digest(checkpoint)
        run_copy.rewrite(lambda line: line.update(sealed) if (line["event"], line.get("step")) == last else None)
        code, printed, errors = export(run_copy.folder, tmp_path / "bf16", "--step", 4)
        assert (code, printed, len(errors.splitlines())) == (1, "", 1)
        assert not list(tmp_path.glob("*bf16*"))
        return errors

    last = ("checkpoint", 4)
    assert "policy/model.safetensors: tensor " in exported("policy/model.safetensors", 0)
    assert "masters.safetensors: its weights have the digest " in exported("masters.safetensors", 0)
    zeros = policy_digest(load_file(checkpoint / "masters.safetensors"))
    state = json.loads((checkpoint / "trainer.json").read_text())
    (checkpoint / "trainer.json").write_text(json.dumps({**state, "digest": zeros}))
    assert "the record of the step has " in exported("optimiser.safetensors", 1, weights_digest=zeros)


def test_a_policy_that_does_not_come_out_equal_is_not_exported(run_copy, export, tmp_path):
    run_copy.change_rewards(3)
    code, _, errors = export(run_copy.folder, tmp_path / "bf16", "--step", 3)
    assert code == 1
    assert "the policy after step 3 cannot be restored: step 3, task train: redoing it gave" in errors
    assert not list(tmp_path.glob("*bf16*"))


def test_the_export_is_linked_to_its_model_or_its_run(run_copy, export, tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("fp8-grpo")
    run_id = client.create_run(experiment).info.run_id
    model = client.create_logged_model(experiment, name="whole-00004", source_run_id=run_id, tags={"step": "4"})
    folder = str(run_copy.folder)
    write_record(run_copy.folder, TrackingRecord(uri=uri, experiment_id=experiment, run_id=run_id, folder=folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    _, printed, _ = export(run_copy.folder, tmp_path / "bf16", "--step", 4)
    assert printed.endswith(f"linked to the MLflow model {model.model_id}\n")
    assert client.get_logged_model(model.model_id).tags["exported_bf16"] == str(tmp_path / "bf16")
    assert origin(tmp_path / "bf16")["mlflow_run_id"] == run_id
    assert origin(tmp_path / "bf16")["mlflow_model_id"] == model.model_id
    _, printed, _ = export(run_copy.folder, tmp_path / "fp8", "--step", 2, "--format", "fp8")
    assert printed.endswith(f"linked to the MLflow run {run_id}\n")
    assert client.get_run(run_id).data.tags["exported_fp8"] == str(tmp_path / "fp8")
    assert origin(tmp_path / "fp8")["mlflow_model_id"] is None


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////nowhere/mlflow.db"])
def test_an_mlflow_that_is_away_is_a_note(run_copy, export, tmp_path, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    folder = str(run_copy.folder)
    write_record(run_copy.folder, TrackingRecord(uri=uri, experiment_id="1", run_id="0" * 32, folder=folder))
    code, printed, _ = export(run_copy.folder, tmp_path / "bf16", "--step", 4)
    assert code == 0
    assert printed.splitlines()[-1].startswith(f"the export is not linked: tracking.uri {uri}: ")
    assert origin(tmp_path / "bf16")["mlflow_run_id"] == "0" * 32


def test_bad_input_is_one_line_and_leaves_nothing(whole_run, export, tmp_path):
    (tmp_path / "there").mkdir()
    for target, step, said in (
        ("there", 4, "already exists; an export is never written over something else"),
        ("new", 9, "run whole: step 9 is not committed; steps 0 to 4 are"),
    ):
        code, printed, errors = export(whole_run.folder, tmp_path / target, "--step", step)
        assert (code, printed, len(errors.splitlines())) == (2, "", 1)
        assert said in errors
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
