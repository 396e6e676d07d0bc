"""A Hugging Face checkpoint trained on data in GSM8K's format; what comes out is a Hugging Face checkpoint again."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8core.models.checkpoint import load_checkpoint

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl.gz"

TINY = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 3,
    "rollout.max_new_tokens": 8,
    "evaluation.prompts": 2,
    "training.warmup_steps": 0,
    "training.learning_rate": 1e-3,
}

# Random weights never answer right; without a spread of rewards nothing would be learnt.
STEPS = """\
import pyarrow as pa

from fp8core.store.tables import REWARDS
from tasks.reward import reward_table
from tasks.step import step


@step(inputs={"prompts": "prompts", "rollouts": "rollouts"}, outputs={"rewards": "rewards"})
def alternating(run, index, options, prompts, rollouts):
    store = run.directory.store
    rows = reward_table(run, store.get_table(prompts), store.get_table(rollouts)).to_pylist()
    rows = [{**row, "reward": float(row["sample"] % 2)} for row in rows]
    return {"rewards": store.put_table("rewards", pa.Table.from_pylist(rows, schema=REWARDS))}
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty problems as GSM8K writes them."""
    rows = [
        {
            "question": f"Maria has {3 * i} pencils and buys {i + 2} more. How many pencils does Maria have?",
            "answer": f"{3 * i}+{i + 2}=<<{3 * i}+{i + 2}={4 * i + 2}>>{4 * i + 2} pencils.\n#### {4 * i + 2:,}",
        }
        for i in range(40)
    ]
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(launch, small_checkpoint, problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    (folder / "real_model_steps.py").write_text(STEPS)
    reward = {"uses": "real_model_steps:alternating", "needs": ["prompts", "rollouts"]}
    overrides = {
        "model": str(small_checkpoint),
        "data.source": str(problems),
        "pipeline.replace": {"reward": reward},
        **TINY,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        finished = launch("real", config="gsm8k", overrides=overrides)
    assert finished.state.is_completed(), finished.state.message
    return finished


def test_rollout_and_training_agree_bit_for_bit(trained):
    assert trained.summary["tmpe_max"] == 1.0
    assert trained.summary["tokens_differing"] == 0
    assert trained.summary["steps"] == 2


def test_the_trained_policy_loads_in_transformers(trained, small_checkpoint):
    folder = trained.folder / "checkpoints" / "00002" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours, before = load_checkpoint(folder), load_checkpoint(small_checkpoint)
    assert ours.architecture == before.architecture
    learnt = {name for name, tensor in ours.tensors.items() if not torch.equal(tensor, before.tensors[name])}
    assert "model.layers.0.mlp.up_proj.weight" in learnt
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, ours.tensors[name].float()), name
    messages = [{"role": "user", "content": "How many pencils?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ours.tokenizer.render([{"role": "user", "content": "How many pencils?"}])
    assert tokenizer(text, add_special_tokens=False).input_ids == ours.tokenizer.encode(text)
    generated = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 1
