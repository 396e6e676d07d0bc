"""`fp8-grpo plan` as a person meets it: table, JSON and refusal; `run` refuses the same before any work."""

import json
import re

import pytest

from flows import cli

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


def test_what_does_not_fit_is_printed_and_refused_in_one_line(plan, tmp_path):
    file = tmp_path / "plan.json"
    code, lines, err = plan("qwen3-aligned", "--gpu", "h100", "--json", str(file))
    assert code == 2
    assert any("does not fit:" in line for line in lines)
    (line,) = err
    assert line.startswith("fp8-grpo: memory: generating on NVIDIA H100 80 GB needs ")
    assert "training on NVIDIA H100 80 GB needs " in line
    assert "there are 79.6; lower training.tokens_per_pass or train on more GPUs; also syncing on " in line
    assert json.loads(file.read_text())["fits"] is False


def test_a_run_is_refused_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUGE))
    assert cli.main(["run", "gsm8k", "--set", "model=."]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fp8-grpo: memory: generating and training on host needs [\d,.]+ GiB \(.*\n", err)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
