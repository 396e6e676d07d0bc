"""Every configuration that is shipped runs, at reduced size: on this CPU, whatever engine and model it names."""

import json
from dataclasses import replace

import pytest

from fp8core.config.load import load_config, shipped_names
from fp8core.models.checkpoint import initial_weights, save_checkpoint
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.run.build import build_base
from fp8core.training.registry import trainer_of

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
EIGHT_GPUS = ("llama", "qwen3", "qwen3-moe", "qwen3-moe-aligned")
SMALL_BATCH = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 4,
    "evaluation.prompts": 1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    rows = [{"question": f"Tom has {i} apples and buys 7 more.", "answer": f"#### {i + 7}"} for i in range(24)]
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def checkpoint(small_checkpoint, bpe_tokenizer, tmp_path):
    """checkpoint(model): a small one of the published model's family, any small one for a model that is left open."""

    def of_family(model):
        if model not in HUB_ARCHITECTURES:
            return small_checkpoint
        published = HUB_ARCHITECTURES[model]
        experts = published.experts and replace(published.experts, count=4, per_token=2, intermediate_size=128)
        vocabulary = {"vocab_size": bpe_tokenizer.vocab_size, "max_positions": 512}
        arch = replace(published, **SIZES, **vocabulary, experts=experts)
        save_checkpoint(tmp_path / "model", arch, initial_weights(arch, seed=0), bpe_tokenizer)
        return tmp_path / "model"

    return of_family


def reduced(name, config, small, checkpoint, problems):
    """What makes a shipped configuration small, without a change of what it computes."""
    if config.architecture is not None:
        return small | {f"architecture.{key}": size for key, size in SIZES.items()}
    # The chat template of the small checkpoint has no tool calls.
    budgets = dict.fromkeys(("environment.turn_tokens", "environment.observation_tokens"), 4)
    called = {} if config.environment is None else {"environment.format": "plain", **budgets}
    return SMALL_BATCH | called | {"model": str(checkpoint(config.model)), "data.source": str(problems)}


@pytest.fixture
def taught(tmp_path):
    """taught(config): where the teacher of a configuration lies that names one, a policy that knows nothing."""

    def setting(config):
        if config.loss.distillation.teacher is None:
            return {}
        base = build_base(config)
        save_checkpoint(tmp_path / "teacher", base.arch, base.tensors, base.tokenizer)
        return {"loss.distillation.teacher": str(tmp_path / "teacher")}

    return setting


# One of each kind in the first tier, as flows: our exact trainer, a pipeline of its own, the references of the kernels.
FIRST_TIER = ("tiny", "careful", "llama-aligned")
EXACT = {"alignment/token_mult_prob_error": 1.0, "alignment/tokens_differing": 0}


def loaded(name):
    return load_config(name, {"model": "Qwen/Qwen3-0.6B"} if name.startswith("gsm8k") else {})


@pytest.fixture
def on_this_cpu(small, checkpoint, problems, taught):
    """on_this_cpu(name): settings that make a shipped configuration run here."""

    def settings(name):
        config = loaded(name)
        # What trains on a GPU has the references of its kernels here.
        here = {
            "rollout.engine": "embedded",
            "training.device": "cpu",
            "training.packed": trainer_of(config.training).name == "packed" or None,
        }
        return {**reduced(name, config, small, checkpoint, problems), **here, **taught(config)}

    return settings


@pytest.mark.parametrize("name", FIRST_TIER)
def test_it_runs(launch, on_this_cpu, name):
    finished = launch(f"shipped-{name}", steps=1, config=name, overrides=on_this_cpu(name))
    assert finished.state.is_completed(), finished.state.message
    assert finished.summary["steps"] == 1
    assert finished.summary["tmpe_max"] == 1.0
    assert finished.summary["tokens_differing"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in shipped_names() if name not in (*FIRST_TIER, *EIGHT_GPUS)])
def test_its_loop_runs(loop_run, on_this_cpu, name):
    run = loop_run(f"shipped-{name}", name, steps=1, **on_this_cpu(name))
    assert {key: run.metric(key)[1] for key in EXACT} == EXACT
