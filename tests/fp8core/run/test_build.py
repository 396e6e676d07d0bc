import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.checkpoint import find_checkpoint, save_checkpoint
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.run.build import build_base, build_engine, build_trainer

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
    assert policy_digest(find_checkpoint(tmp_path / "export").source()) == trainer.digest()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert len({tuple(completion.tokens) for completion in ours}) == 3
    for prompt, completion in zip(prompts, ours, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert completion.tokens == theirs.tolist()


def test_a_dense_model_has_no_experts_to_replay_or_balance():
    with pytest.raises(
        UserError, match=r"^rollout\.router_replay: replays the choice of experts, but the model has none$"
    ):
        build_base(load_config("tiny", {"rollout.router_replay": True}))
    with pytest.raises(UserError, match=r"^loss\.router\.z=0\.1: the model has no experts; set it to 0$"):
        build_base(load_config("tiny", {"loss.router.z": 0.1}))
    assert build_base(
        load_config("tiny-moe", {"rollout.router_replay": True, "loss.router.z": 0.1})
    ).arch.sparse_layers == (0, 1)
