import io
import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8core.config.capability import Node, this_node
from fp8core.config.derived import sft_training
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.architecture import parameter_shapes
from fp8core.models.checkpoint import initial_weights, load_checkpoint, save_checkpoint
from fp8core.models.quantised_checkpoint import KeptInBf16, plan_quantisation, write_checkpoint
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.numerics.recipe import POW2
from fp8core.report.console import Console
from fp8core.rl.batch import RolloutBatch, TokenBatch, length_mask, pad
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.run.build import build_base, build_engine, build_trainer
from fp8core.run.checks.machine import check_engine, check_memory
from fp8core.run.checks.settings import graph_of
from fp8core.run.machine import engine_environment
from fp8core.run.open import open_directory, open_run
from fp8core.training.registry import packages_of, trainer_of

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


@pytest.mark.parametrize(("first", "last", "sum_"), [(3, 0, 3), (0, 3, 3), (1, 2, 3)])
def test_more_bf16_layers_than_layers(first, last, sum_):
    config = load_config("tiny", {"precision.bf16_first_layers": first, "precision.bf16_last_layers": last})
    message = f"precision.bf16_first_layers + bf16_last_layers = {sum_}, but the model has 2 layers"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        build_base(config)


def test_as_many_bf16_layers_as_layers_are_allowed():
    config = load_config("tiny", {"precision.bf16_first_layers": 1, "precision.bf16_last_layers": 1})
    assert build_engine(config, build_base(config).arch).describe()["linear"] == ["bf16", "bf16"]


def test_a_warm_start_of_a_checkpoint_is_refused_before_it_is_looked_for(tmp_path):
    config = load_config("tiny", {"architecture": None, "model": tmp_path / "nowhere"})
    with pytest.raises(UserError, match=r"^warm_start on the chain task.s demonstrations is for a model from scratch"):
        build_base(config)


def test_from_scratch_only_the_chain_task_is_learnt():
    config = load_config("tiny", {"warm_start": None, "data.source": "problems.jsonl"})
    with pytest.raises(UserError, match=r"data\.source is problems\.jsonl; set model$"):
        build_base(config)


def test_a_checkpoint_that_is_not_there(gsm8k, tmp_path):
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path / 'nowhere'))}: no such folder"):
        build_base(gsm8k(model=tmp_path / "nowhere"))


def test_a_checkpoint_without_weights(gsm8k, tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        build_base(gsm8k(model=tmp_path))


def test_a_revision_of_a_folder(gsm8k):
    with pytest.raises(UserError, match="revision=abc applies to hub ids"):
        build_base(gsm8k(revision="abc"))


def test_more_bf16_layers_than_the_checkpoint_has(gsm8k):
    with pytest.raises(UserError, match=r"= 5, but the model has 2 layers$"):
        build_base(gsm8k(**{"precision.bf16_first_layers": 5}))


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
        with pytest.raises(UserError, match=r"^rollout.engine=vllm: vLLM is not installed; "):
            ask(config, this_node(packages_of(config)))


def test_the_embedded_engine_asks_for_nothing(gsm8k):
    check_engine(gsm8k(), this_node())
    assert engine_environment(gsm8k(), this_node()).required == engine_environment(gsm8k(), this_node()).suggested == {}


def environment_elsewhere(node):
    config = load_config("h200-small", {"cluster.address": "HEAD:6379"})
    check_engine(config, node)
    check_memory(config, node, None)
    return engine_environment(config, node)


FORMS = ("fp32", "bf16")
HOPPER = Node("sm_90", 8, ("NVIDIA H200", 143_771 << 20), 1 << 41, {"vllm": "0.26.0"})


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        (
            replace(HOPPER, platform="cpu", gpus=0, gpu=None),
            "h200-small trains on a GPU, .* tiny runs on a CPU",
        ),
        (replace(HOPPER, packages={}), "rollout.engine=vllm: vLLM is not installed"),
        (replace(HOPPER, packages={"vllm": "0.20.0"}), "rollout.engine=vllm: vllm 0.20.0 is installed"),
        (replace(HOPPER, gpu=("NVIDIA H200", 4 << 30)), "memory: generating on NVIDIA H200 needs .* there are 4.0"),
    ],
)
def test_a_machine_elsewhere_decides_what_is_refused(node, complaint):
    """This one has no GPU and no vLLM."""
    with pytest.raises(UserError, match=f"^{complaint}") as refused:
        environment_elsewhere(node)
    assert "\n" not in str(refused.value)


def test_a_machine_elsewhere_that_fits_is_taken():
    assert environment_elsewhere(HOPPER).required["VLLM_BATCH_INVARIANT"] in "01"


def test_torch_trains_the_warm_start_on_the_gpu_whatever_trains_after_it():
    """Runs of all trainers start from one policy; Megatron's own may not be repeatable."""
    unlike = ["training.trainer=megatron", "training.deterministic=false", "replay.level=tolerant"]
    formats = ["precision.training.kv_cache=bf16", "correction.method=token_tis", "rollout.vllm.model=stock"]
    megatron = load_config("h200-small", [*unlike, *formats, "rollout.engine=embedded"])
    settings = sft_training(megatron)
    assert settings == sft_training(load_config("h200-small"))
    assert trainer_of(settings).name == "packed"
    assert settings.deterministic
    needed = engine_environment(megatron, this_node(packages_of(megatron))).required
    assert needed["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_warm_start_has_the_moments_of_the_training_after_it():
    """In FP32 a model that trains beside its engine may not fit its warm start."""
    settings = {form: sft_training(load_config("qwen3-aligned", {"training.optimiser_state": form})) for form in FORMS}
    assert {form: each.optimiser_state for form, each in settings.items()} == {form: form for form in FORMS}
    # By its settings a stored warm start is found again: those of earlier versions had none of another format.
    assert settings["fp32"] == settings["bf16"].model_copy(update={"optimiser_state": "fp32"})


def test_no_memory_is_asked_for_a_warm_start_that_is_over(loop_run):
    """A run that has begun goes on where its warm start would not fit any more."""
    ledger = loop_run("over", steps=1).ledger
    warm = {"warm_start.demonstrations": "demonstrations.jsonl", "training.optimiser_state": "fp32"}
    config, node = load_config("qwen3-aligned", {**warm, "training.lora": {}}), replace(HOPPER, gpus=1)
    with pytest.raises(UserError, match=r"^memory: warm start on NVIDIA H200 needs "):
        check_memory(config, node, None)
    check_memory(config, node, ledger)


def test_a_checkpoint_in_block_fp8_and_a_second_reference_are_told_once(small_checkpoint, gsm8k, tmp_path):
    write_checkpoint(plan_quantisation(small_checkpoint, KeptInBf16(), POW2.weights), tmp_path / "fp8", lambda *_: None)
    problems = tmp_path / "problems.jsonl"
    row = {"question": QUESTIONS[0], "answer": "#### 19"}
    rows = [{**row, "question": f"{i}: {QUESTIONS[0]}"} for i in range(200)]
    rows.append({**rows[6], "answer": "#### 20"})
    problems.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    settings = {"data.source": problems, "evaluation.prompts": 1, "runs": tmp_path / "runs"}
    told, config = io.StringIO(), gsm8k(model=tmp_path / "fp8", **settings)
    with (
        open_directory(config, "fp8") as directory,
        open_run(config, graph_of(config), directory, Console(told, config.steps)) as run,
    ):
        assert {tensor.dtype for tensor in run.base.values()} == {torch.bfloat16}
    assert told.getvalue().count("14 weights in block FP8 are read as BF16") == 1
    second = "problems.jsonl:201: the question of "
    assert "".join(told.getvalue().split()).count("".join(second.split())) == 1
