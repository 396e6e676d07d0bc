"""A reward model scores as transformers alone does, with equal bits each time; what is none is refused."""

import json
import math
from contextlib import closing

import pytest
import torch
from tiny_reward_model import save_reward_model
from transformers import AutoModelForSequenceClassification

from fp8core.config.load import load_config
from fp8core.config.reward import RewardConfig
from fp8core.errors import UserError
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run
from fp8core.resources.memory import Device, Machine
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier

COMPLETIONS = ["yes", "no, the boxes have 12 apples in all", "x" * 40, "7", "maybe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bpe_tokenizer):
    return save_reward_model(tmp_path_factory.mktemp("rewards") / "model", bpe_tokenizer)


def request(text, finish="stop"):
    messages = json.dumps([["system", "Be brief."], ["user", "How many?"]])
    return ScoreRequest("<rendered>", text, "2", finish, "", "", messages)


def verdicts(folder, texts=COMPLETIONS, **options):
    config = RewardConfig(verifier="reward_model", options={"model": str(folder), **options})
    with closing(build_verifier(config)) as verifier:
        return verifier.verify([request(text) for text in texts])


def scores(folder, tokenizer, texts):
    """One at a time, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in texts:
        tokens = tokenizer.encode(f"<system>Be brief.\n<user>How many?\n<assistant>{text}\n")
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([tokens])).logits.item())
    return found


def test_scores_are_those_of_transformers(folder, bpe_tokenizer):
    expected = scores(folder, bpe_tokenizer, COMPLETIONS)
    assert max(expected) - min(expected) > 0.1
    found = verdicts(folder, batch_size=2)
    assert [verdict.score for verdict in found] == pytest.approx(expected, abs=1e-5)
    assert [verdict.outcome for verdict in found] == ["right" if score >= 1 else "wrong" for score in expected]
    again = verdicts(folder, [*COMPLETIONS[::-1], "yes"], batch_size=2)
    assert [verdict.score for verdict in again[:5]] == [verdict.score for verdict in found[::-1]]
    squashed = verdicts(folder, sigmoid=True, scale=-2, offset=3)
    values = [3 - 2 / (1 + math.exp(-score)) for score in expected]
    assert [verdict.score for verdict in squashed] == pytest.approx(values, abs=1e-5)


def test_a_long_text_loses_its_beginning(folder, bpe_tokenizer):
    (cut,) = verdicts(folder, ["yes" * 30], max_tokens=12)
    (same_end,) = verdicts(folder, ["no" * 30 + "yes" * 30], max_tokens=12)
    assert cut.score == same_end.score
    assert cut.detail.endswith("the last 12")


def test_what_is_no_reward_model_is_refused_before_it_scores(folder, small_checkpoint, bpe_tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"^reward.options.model=.*: it is no sequence classifier; its architectures"):
        verdicts(small_checkpoint)
    with pytest.raises(UserError, match=r"^reward.options.model=./nowhere: no such folder"):
        verdicts("./nowhere")
    with pytest.raises(UserError, match=r"options.device=cuda:99: torch finds \d+ GPUs here"):
        verdicts(folder, device="cuda:99")
    with pytest.raises(UserError, match="it has 3 labels; a reward model has one"):
        verdicts(save_reward_model(tmp_path / "three", bpe_tokenizer, labels=3))
    without = save_reward_model(tmp_path / "without", bpe_tokenizer)
    (without / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="it has no chat template"):
        verdicts(without)
    # A policy that calls itself one: the weights of the score would be random.
    policy = AutoModelForSequenceClassification.from_pretrained(folder).model
    headless = save_reward_model(tmp_path / "headless", bpe_tokenizer)
    config = (headless / "config.json").read_text()
    policy.save_pretrained(headless)
    (headless / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"it has no weights score\.weight"):
        verdicts(headless)


def test_a_plan_counts_its_weights(folder):
    numbers = sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).parameters())
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        options = {"model": str(folder), "dtype": dtype}
        config = load_config("tiny", {"reward": {"verifier": "reward_model", "options": options}})
        plan = plan_run(config, model_shape(config), Machine(None, Device("host", 1 << 40)))
        needs = {need.item: need.bytes for device in plan.devices for each in device.phases for need in each.needs}
        assert needs["reward model"] == numbers * width
