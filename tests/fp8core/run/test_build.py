from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8core.config.capability import this_node
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.architecture import parameter_shapes
from fp8core.models.checkpoint import initial_weights, load_checkpoint, save_checkpoint
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.numerics.recipe import POW2
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask, pad
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.run.build import build_base, build_engine, build_trainer
from fp8core.run.checks.machine import check_engine
from fp8core.run.machine import engine_environment
from fp8core.training.registry import packages_of

FP32 = {f"precision.{side}": {"linear": "fp32", "kv_cache": "fp32"} for side in ("rollout", "training")}
QUESTIONS = ("Tom has 17 apples and buys 2 more. How many apples does Tom have now?", "How many pencils are left?", "7")


@pytest.fixture
def gsm8k(small_checkpoint):
    """Overrides to the configuration of the small checkpoint."""

    def configured(**overrides):
        return load_config("gsm8k", {"model": small_checkpoint, **overrides})

    return configured


def started(config):
    """Base model, trainer and engine, in step and with scales from some prompts."""
    base = build_base(config)
    trainer, engine = build_trainer(config, base.arch, base.tensors), build_engine(config, base.arch)
    prompts = TokenBatch.of([base.tokenizer.encode(question) for question in QUESTIONS], [[5]] * len(QUESTIONS))
    layers = scales_from_statistics(trainer.statistics(prompts).amax(), 2.0, config.precision.recipe.cache)
    scales = PolicyScales(0, tuple(layers))
    engine.update(trainer.export(), scales, 0)
    return base, trainer, engine, scales


def completed(engine, groups, sampling):
    found = [completion for finished in engine.generate(groups, sampling) for completion in finished]
    return sorted(found, key=lambda completion: (completion.group, completion.sample))


# --- from scratch ---


def test_tiny_is_built_from_scratch():
    config = load_config("tiny")
    base = build_base(config)
    assert {name: tuple(t.shape) for name, t in base.tensors.items()} == parameter_shapes(base.arch)
    assert (base.arch.hidden_size, base.arch.intermediate_size, base.arch.vocab_size) == (128, 256, 32)
    assert base.tokenizer.encode("2*7-0=4,#3$")[-1] in base.tokenizer.eos_ids
    assert base.tokenizer.vocab_size == base.arch.vocab_size
    assert base.revision is None
    assert policy_digest(dict(base.tensors)) == policy_digest(initial_weights(base.arch, config.seed))
    other = build_base(load_config("tiny", {"seed": 1}))
    assert policy_digest(dict(other.tensors)) != policy_digest(dict(base.tensors))


def test_trainer_and_engine_follow_the_contract():
    config = load_config("tiny", {"precision.bf16_last_layers": 1, "precision.training.linear": "bf16"})
    base = build_base(config)
    trainer, engine = build_trainer(config, base.arch, base.tensors), build_engine(config, base.arch)
    assert engine.describe()["linear"] == ["fp8_block", "bf16"]
    names = StoredNames.by_layer("fp8_block", "bf16")
    assert policy_digest(trainer.export()) == policy_digest(stored_weights(base.tensors, names, POW2.weights))
    assert trainer.digest() == policy_digest(dict(base.tensors))


# --- refusals ---


# --- a checkpoint, all the way ---


@pytest.fixture(params=["qwen3", "qwen2"])
def checkpoint(request, small_checkpoint, tmp_path):
    """The small checkpoint, or one of its sizes with biases and partial tiles."""
    if request.param == "qwen3":
        return small_checkpoint
    small = load_checkpoint(small_checkpoint)
    sizes = {"hidden_size": 192, "num_heads": 6, "qk_norm": False, "qkv_bias": True, "tie_embeddings": True}
    arch = replace(small.architecture, family="qwen2", **sizes)
    save_checkpoint(tmp_path / "qwen2", arch, initial_weights(arch, seed=0), small.tokenizer)
    return tmp_path / "qwen2"


@pytest.mark.parametrize("precision", [{}, {"precision.scale_rule": "fp32"}, FP32], ids=["fp8", "fp32 scales", "fp32"])
def test_a_checkpoint_generates_and_trains(checkpoint, gsm8k, groups_of, precision, tmp_path):
    settings = {"training.warmup_steps": 0, "training.learning_rate": 1e-3}
    config = gsm8k(model=checkpoint, **precision, **settings)
    base, trainer, engine, scales = started(config)
    assert trainer.digest() == policy_digest({name: tensor.float() for name, tensor in base.tensors.items()})

    groups = groups_of([base.tokenizer.encode(question) for question in QUESTIONS], 4)
    found = completed(engine, groups, Sampling(1.0, 6, base.tokenizer.eos_ids))
    tokens = [completion.tokens for completion in found]
    sequences = TokenBatch.of([groups[completion.group].prompt for completion in found], tokens)
    old = trainer.logprobs(sequences, 1.0, scales.layers).logprobs.nan_to_num()
    rollout = pad([completion.logprobs for completion in found], torch.float32, 0.0)
    exact = config.precision.rollout.linear != "fp32"
    assert torch.equal(old, rollout) if exact else torch.allclose(old, rollout, atol=1e-5)

    wanted = torch.tensor([1.0 if row[0] < 300 else -1.0 for row in tokens])
    keep = torch.ones(len(tokens), dtype=torch.bool)
    batch = RolloutBatch(sequences, length_mask(tokens), rollout, old, None, wanted, keep)
    report = trainer.step(batch, 1.0, scales.layers)
    assert report.tokens == sum(map(len, tokens))
    moved = trainer.logprobs(sequences, 1.0, scales.layers).logprobs.nan_to_num().sum(1) - old.sum(1)
    assert (moved * wanted).mean() > 0
    biases = [tensor for name, tensor in trainer.masters.items() if name.endswith(".bias")]
    assert all(bias.any() for bias in biases), "biases begin at 0, and learn"

    (tmp_path / "state").mkdir()
    trainer.save(tmp_path / "state")
    restored = build_trainer(config, base.arch, base.tensors)
    restored.load(tmp_path / "state")
    assert restored.digest() == trainer.digest()

    save_checkpoint(tmp_path / "export", base.arch, trainer.masters, base.tokenizer)
    exported = build_base(gsm8k(**precision, model=tmp_path / "export"))
    again = build_trainer(config, exported.arch, exported.tensors)
    if exact:
        assert policy_digest(again.export()) == policy_digest(trainer.export()), "BF16 on disk quantises to the same"


def test_an_exported_policy_answers_in_transformers_as_in_the_engine(gsm8k, groups_of, tmp_path):
    """Greedy tokens in FP32, after a step of training."""
    config = gsm8k(**FP32, **{"training.warmup_steps": 0, "training.learning_rate": 1e-3})
    base, trainer, engine, _ = started(config)
    prompts = [base.tokenizer.encode(question) for question in QUESTIONS]
    sequences = TokenBatch.of(prompts, [[9, 8, 7]] * 3)
    zeros, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    batch = RolloutBatch(sequences, mask, zeros, zeros, None, torch.tensor([1.0, -1.0, 0.5]), mask[:, 0])
    trainer.step(batch, 1.0, ())
    engine.update(trainer.export(), PolicyScales(1, ()), 1)
    groups = groups_of(prompts, 1)
    ours = completed(engine, groups, Sampling(0.0, 12, base.tokenizer.eos_ids))

    save_checkpoint(tmp_path / "export", base.arch, trainer.masters, base.tokenizer, dtype=torch.float32)
    assert policy_digest(load_checkpoint(tmp_path / "export").tensors) == trainer.digest()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert len({tuple(completion.tokens) for completion in ours}) == 3
    for prompt, completion in zip(prompts, ours, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert completion.tokens == theirs.tolist()


def test_a_dense_model_has_no_choice_to_replay():
    with pytest.raises(
        UserError, match=r"^rollout\.router_replay: replays the choice of experts, but the model has none$"
    ):
        build_base(load_config("tiny", {"rollout.router_replay": True}))
    assert build_base(load_config("tiny-moe", {"rollout.router_replay": True})).arch.sparse_layers == (0, 1)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_where_there_is_none_is_refused_before_any_work(gsm8k):
    config = gsm8k(**{"rollout.engine": "vllm"})
    for ask in (check_engine, engine_environment):
        with pytest.raises(UserError, match=r"^rollout.engine=vllm: it is not installed; "):
            ask(config, this_node(packages_of(config)))
