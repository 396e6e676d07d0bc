"""`fp8-grpo plan` as a person meets it: table, JSON and refusal; `run` refuses the same before any work."""

import json
import re
from pathlib import Path

import pytest

from flows import cli

EIGHT_GPUS = ["llama", "qwen3", "qwen3-moe"]
ONE_GPU = ["llama-aligned", "llama-nightly", "qwen3-aligned", "h200-small"]
HUGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def plan(capsys):
    """plan("qwen3", "--gpu", "h200"): exit code, lines printed, lines on stderr."""

    def call(*arguments):
        code = cli.main(["plan", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def rows(lines, title):
    """Item -> size of the table with this title."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    table = lines[start + 1 : lines.index("", start)]
    found = [re.match(r"  (.+?)  +(\S+)", line) for line in table]
    return {row[1]: float(row[2].replace(",", "")) for row in found if row}


def test_what_trains_on_the_host_has_a_table_of_its_own(plan):
    _, lines, _ = plan("qwen3-aligned", "--gpu", "h200", "--set", "training={device: cpu}")
    host = rows(lines, "training on host")
    assert host.pop("total") == pytest.approx(sum(host.values()), abs=0.3)


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_the_configurations_with_megatron_fit_eight_h200_that_also_generate(plan, monkeypatch, name):
    """Named, and by default where there is no GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, lines, err = plan(name)
    assert (code, err) == (0, [])
    for phase in ("generating", "training", "syncing"):
        assert {"master weights", "gradients"} < rows(lines, f"{phase} on each of 8 NVIDIA H200").keys()
    assert not any(line.startswith("training on host") for line in lines)
    assert re.fullmatch(r"cache  [\d,]+ tokens in each of 8 engines: \d+ sequences of [\d,]+, 64 wanted", lines[-4])
    assert lines[-1] == "fits"
    assert plan(name, "--gpu", "h200")[:2] == (code, lines)


@pytest.mark.parametrize("name", ONE_GPU)
def test_the_others_for_gpus_fit_one_h200(plan, name):
    code, lines, _ = plan(name, "--gpu", "h200")
    assert code == 0
    assert rows(lines, "training on NVIDIA H200").keys() > {"master weights", "gradients", "activations"}


def test_json_has_bytes(plan, tmp_path):
    file = tmp_path / "plan.json"
    assert plan("qwen3-aligned", "--gpu", "h200", "--json", str(file))[0] == 0
    written = json.loads(file.read_text())
    assert written["fits"] is True
    assert written["parameters"]["linear"] == 6_945_767_424
    assert written["cache"]["bytes_per_token"] == 73_728
    phases = {phase["name"]: phase for phase in written["devices"][0]["phases"]}
    assert list(phases) == ["generating", "training", "syncing"]
    for phase in phases.values():
        assert sum(need["bytes"] for need in phase["needs"]) < phase["limit"]


def test_what_does_not_fit_is_printed_and_refused_in_one_line(plan, tmp_path):
    file = tmp_path / "plan.json"
    code, lines, err = plan("qwen3-aligned", "--gpu", "h100", "--gpus", "1", "--json", str(file))
    assert code == 2
    assert any("does not fit:" in line for line in lines)
    (line,) = err
    assert line.startswith("fp8-grpo: memory: generating on NVIDIA H100 80 GB needs ")
    assert "training on NVIDIA H100 80 GB needs " in line
    assert "there are 79.6; lower training.tokens_per_pass or train on more GPUs; also syncing on " in line
    assert json.loads(file.read_text())["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a100"], "--gpu a100: unknown; known: h100, h200, b200"),
        (["--tensor", "2"], "--tensor, --pipeline and --expert divide the GPUs of --gpus N"),
        (["--gpus", "8", "--tensor", "3"], "8 GPUs are no multiple of tensor 3 x pipeline 1"),
        (["--gpus", "8", "--hosts", "3"], "--gpus 8: no multiple of --hosts 3"),
        (["--gpus", "4"], "cluster.engines=8, ranks=8, placement=colocated: 8 GPUs are needed, --gpus is 4"),
    ],
)
def test_a_wrong_option_is_one_line(plan, arguments, message):
    code, lines, err = plan("qwen3", *arguments)
    assert (code, lines, err) == (2, [], [f"fp8-grpo: {message}"])


@pytest.mark.parametrize(
    ("options", "titles"),
    [
        (["--gpus", "1"], ["generating on NVIDIA H200", "training on NVIDIA H200", "syncing on NVIDIA H200"]),
        (["--gpus", "16", "--hosts", "2"], [f"{name} on each of 16 NVIDIA" for name in ("generating", "training")]),
        (
            ["--gpus", "8", "--set", "cluster.placement=separate"],
            [f"{name} on each of 4 NVIDIA" for name in ("generating", "training", "syncing")],
        ),
    ],
)
def test_an_aligned_configuration_fits_any_number_of_gpus(plan, options, titles):
    code, lines, err = plan("qwen3-aligned", "--gpu", "h200", *options)
    assert (code, err) == (0, [])
    assert all(rows(lines, title) for title in titles)


def test_tiny_fits_here_and_has_an_engine_of_its_own(plan):
    code, lines, _ = plan("tiny")
    assert code == 0
    assert lines[0].startswith("model  303,872 parameters")
    assert rows(lines, "generating and training on host").keys() > {"engine weights", "gradients"}
    assert not any(line.startswith("cache") for line in lines)


def test_generation_ahead_keeps_policies_in_main_memory(plan, tmp_path):
    file, mode = tmp_path / "plan.json", ["--set", "pipeline.mode=asynchronous", "--set", "pipeline.max_staleness=2"]
    code, lines, _ = plan("tiny", *mode, "--json", str(file))
    written = json.loads(file.read_text())
    assert code == 0
    assert rows(lines, "generating and training on host")["policies kept for scores"] > 0
    needs = {need["item"]: need["bytes"] for need in written["devices"][0]["phases"][0]["needs"]}
    assert needs["policies kept for scores"] == 4 * needs["engine weights"]
    assert any(
        line.startswith("ahead  asynchronous: tokens at most 2 versions old; 4 policies in main") for line in lines
    )
    assert not any(line.startswith("ahead") for line in plan("tiny")[1])
    # They lie as the trainer reads them: the policy that is trained in BF16, of which the engine gets FP8.
    plan("tiny", *mode, "--set", "precision.training.linear=bf16", "--json", str(file))
    mixed = {need["item"]: need["bytes"] for need in json.loads(file.read_text())["devices"][0]["phases"][0]["needs"]}
    assert mixed["engine weights"] == needs["engine weights"]
    assert mixed["policies kept for scores"] == 4 * 2 * 303_872


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            ["tiny", "--set", "precision.training.linear=bf16", "--set", "correction.method=none"],
            "they differ in linear",
        ),
        (["h200-small", "--set", "rollout.top_k=5"], "rollout.top_k=5: rollout.engine=vllm"),
        (
            ["tiny", "--gpu", "h100", "--set", "logprobs.source=rollout", "--set", "training.packed=true"],
            "not promised",
        ),
        (["tiny", "--set", "training.lora={rank: 1024}"], "training.lora.rank=1024: "),
        (["tiny", "--set", "rollout.max_new_tokens=1000"], "rollout.max_new_tokens=1000: no prompt fits beside it"),
        (["tiny", "--gpus", "2"], "--gpus 2: nothing of tiny computes on a GPU: training.device=cpu"),
    ],
)
def test_what_no_machine_runs_does_not_fit(plan, asked, reason):
    code, _, (error,) = plan(*asked)
    assert code == 2
    assert reason in error


def test_a_run_is_refused_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUGE))
    assert cli.main(["run", "gsm8k", "--set", "model=."]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fp8-grpo: memory: generating and training on host needs [\d,.]+ GiB \(.*\n", err)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_page_shows_what_is_printed(plan):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text()
    command, shown = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("sh", "text"))
    # One of the phases is enough.
    assert {*shown.splitlines()} <= {*plan(*command.split()[2:])[1]}
