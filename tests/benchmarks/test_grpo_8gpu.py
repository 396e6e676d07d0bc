import json
import shutil

import numpy as np
import pytest

from benchmarks.grpo_8gpu import NEMO, SHAPES, SOURCES, VARIANTS, ends_for, main, options_of, planned, shape
from benchmarks.harness import gpu_here
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.resources.memory import GPUS, Machine
from fp8core.run.checks.settings import pipeline_of
from fp8core.store.artifacts import ArtifactStore
from fp8core.training.registry import trainer_grid


@pytest.mark.parametrize("vocab", [151_936, 128_256])
def test_the_ends_give_the_mean_length(vocab):
    drawn = np.random.default_rng(0).geometric(ends_for(vocab, NEMO.longest, NEMO.mean) / vocab, 400_000)
    assert np.minimum(drawn, NEMO.longest).mean() == pytest.approx(NEMO.mean, rel=0.01)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("precision", VARIANTS)
@pytest.mark.parametrize(("gpus", "gpu"), [(1, "h200"), (4, "h100"), (8, "h200"), (8, "h100")])
def test_256_completions_a_gpu_fit(model, precision, gpus, gpu, tmp_path):
    options = options_of(["--out", str(tmp_path), "--gpus", str(gpus)])
    training = planned(model, precision, options)
    config, machine = load_config(training.config, training.settings), Machine(GPUS[gpu], None)
    assert config.rollout.prompts_per_step * config.rollout.group_size == 256 * gpus
    refuse_unfit(plan_run(config, shape(model, options)[0], machine, trainer_grid(config, machine)))


def test_rows_of_committed_steps_join_those_of_other_calls(whole_run, tmp_path, capsys):
    options = ["--out", str(tmp_path), "--gpus", "1", "--tiny", "--steps", "3", "--precisions", "fp8"]
    (tmp_path / "model-qwen3-8b-2-tiny").mkdir()
    shutil.copytree(whole_run.folder, tmp_path / "runs" / "qwen3-8b-2-tiny-fp8-1-0-synchronous-0-pass")
    keys = {"kind": "grpo_step", "precision": "fp8", "layers": 2, "gpus": 1, "engines": 1}
    keys |= {"mode": "synchronous", "staleness": 0, "logprobs": "pass"}
    other = {**keys, "model": "other", "completions": 1, "tokens_verified": 1, "hardware": {}}
    guess = [{**keys, "model": "rehearsal of qwen3-8b", "predicted": {"tokens_per_s_per_gpu": 7}}]
    measured = {"tokens_per_s_per_gpu": 1.0, "seconds": {}, "length_mean": 1.0, "error_max": 1.0, "tokens_differing": 0}
    (tmp_path / "grpo_8gpu.json").write_text(json.dumps([{**other, **measured, "predicted": None}]))
    (tmp_path / "guess.json").write_text(json.dumps(guess))
    for _ in range(2):
        assert main([*options, "--models", "qwen3-8b", "--predict", str(tmp_path / "guess.json")]) == 0
    (first, row) = json.loads((tmp_path / "grpo_8gpu.json").read_text())
    assert (first["model"], row["predicted"]) == ("other", {"tokens_per_s_per_gpu": 7})
    steps = [whole_run.ledger.artifacts(i)["rollouts"] for i in (2, 3, 4)]
    tables = [ArtifactStore(whole_run.folder).get_table(ref) for ref in steps]
    lengths = [len(tokens) for table in tables for tokens in table["tokens"].to_pylist()]
    prompts = [len(tokens) for table in tables for tokens in table["prompt_tokens"].to_pylist()]
    assert row["tokens"] == round((sum(lengths) + sum(prompts)) / 3)
    assert (row["length_longest"], row["length_mean"]) == (max(lengths), pytest.approx(np.mean(lengths)))
    assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens"] / row["seconds"]["wall"], rel=5e-3)
    assert (row["error_max"], row["tokens_differing"]) == (1.0, 0)
    assert row["tokens_verified"] >= sum(lengths)
    here = gpu_here().get("gpu", "CPU").removeprefix("NVIDIA ").split()[0]
    assert f"| rehearsal of qwen3-8b, 2 layers | fp8 | 1 | {here} | 1 | synchronous | 0 |" in capsys.readouterr().out


def test_a_row_says_which_share_of_its_tokens_its_steps_have_written(loop_run, tmp_path):
    settings = {"pipeline.mode": "asynchronous", "pipeline.max_staleness": 1, "pipeline.ahead_tokens": 4}
    run = loop_run("ahead", **settings, **{"pipeline.chunk_tokens": 2})
    (tmp_path / "model-qwen3-8b-2-tiny").mkdir()
    shutil.copytree(run.folder, tmp_path / "runs" / "qwen3-8b-2-tiny-fp8-1-0-asynchronous-1-pass")
    options = ["--out", str(tmp_path), "--gpus", "1", "--tiny", "--steps", "3", "--models", "qwen3-8b"]
    assert main([*options, "--precisions", "fp8", "--mode", "asynchronous"]) == 0
    (row,) = json.loads((tmp_path / "grpo_8gpu.json").read_text())
    store = ArtifactStore(run.folder)
    trained = [store.get_table(run.ledger.artifacts(step)["rollouts"]) for step in (2, 3, 4)]
    left = store.get_table(run.ledger.artifacts(4)["next_stream"])
    # Step 1 writes with version 0.
    versions = [version for table in (*trained, left) for row in table["versions"].to_pylist() for version in row]
    tokens = sum(len(tokens) for table in trained for tokens in table["tokens"].to_pylist())
    assert row["written"] == pytest.approx(sum(version > 0 for version in versions) / tokens)
    assert abs(row["written"] - 1) > 0.01


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
@pytest.mark.parametrize(("engines", "ranks"), [(1, 3), (0, 4)])
@pytest.mark.parametrize("source", SOURCES)
def test_engines_that_generate_beside_the_update_fit(mode, engines, ranks, source, tmp_path):
    asked = ["--gpus", "4", "--engines", str(engines), "--mode", mode, "--logprobs", source]
    options = options_of(["--out", str(tmp_path), *asked])
    training = planned("qwen3-8b", "fp8", options)
    config, machine = load_config(training.config, training.settings), Machine(GPUS["h100"], None)
    assert (config.cluster.engines, config.cluster.ranks, config.pipeline.mode) == (engines or 4, ranks, mode)
    assert (config.logprobs.source, pipeline_of(config).steps[0].name) == (source, "rollout")
    assert config.rollout.prompts_per_step * config.rollout.group_size == 256 * 4
    refuse_unfit(plan_run(config, shape("qwen3-8b", options)[0], machine, trainer_grid(config, machine)))


def test_a_rollout_that_generates_for_three_steps_fits(tmp_path):
    asked = ["--gpus", "4", "--mode", "in_turn", "--staleness", "2", "--logprobs", "rollout", "--steps", "3"]
    options = options_of(["--out", str(tmp_path), *asked])
    training = planned("qwen3-8b", "fp8", options)
    config, machine = load_config(training.config, training.settings), Machine(GPUS["h200"], None)
    assert (config.rollout.max_batch, config.pipeline.ahead_tokens, config.rollout.vllm.sleep) == (768, 0, True)
    assert pipeline_of(config).steps[0].name == "rollout"
    refuse_unfit(plan_run(config, shape("qwen3-8b", options)[0], machine, trainer_grid(config, machine)))
    with pytest.raises(UserError, match=r"rollout\.vllm\.sleep is not computed"):
        pipeline_of(load_config(training.config, [*training.settings, "pipeline.ahead_tokens=1"]))
