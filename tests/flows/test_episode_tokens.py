"""A run with a BPE tokenizer, Qwen3's template and calls of a tool, in which tokens are not what their text encodes to.

A byte-level BPE tokenizer writes most texts in many ways, and only one is what it encodes. So a run that encodes the
policy's text again learns from tokens that were never drawn.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import tokenizers
import torch
from chat_templates import CONTROLS, NAMED, QWEN3
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flows.cli import main
from fp8core.models.architecture import architecture_from_hf, parameter_shapes
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.tokenizer import Tokenizer
from fp8core.rollout.embedded import EmbeddedSession

HEAD, TAIL = '{"name": "calculate", "arguments": {"expression": "', '"}}'
# Without a reward all groups would be left out, and both steps would have one policy.
ENVIRONMENT = """
from dataclasses import replace

from fp8core.environments.shipped import Calculator


class Praised(Calculator):
    def step(self, action):
        return replace(super().step(action), reward=0.25 * len(action.calls))
"""


def build_tokenizer():
    """Trained on calls without a split before: what all calls have is one token, and common expressions are."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    calls = [f"{HEAD}{a}+{b}{TAIL}" for a in range(10, 30) for b in range(1, 20)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(calls, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS[:2]])
    backend.add_tokens([AddedToken(text, special=False) for text in NAMED[:-1]])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=QWEN3, eos_token=CONTROLS[1])
    return Tokenizer(fast, frozenset(), "a folder")


TOKENIZER = build_tokenizer()


def one_token(text):
    (token,) = TOKENIZER.encode(text)
    return token


def build_weights(architecture):
    """Random ones, whose head mostly writes calls: the token that comes next depends on the newest one."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(architecture).items()}
    for name, weight in weights.items():
        # Earlier tokens count for little.
        scale = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights[name] = torch.ones_like(weight) if weight.ndim == 1 else scale * weight / weight.shape[1] ** 0.5
    embedding, head = weights["model.embed_tokens.weight"].sign(), weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] = embedding
    digits, sign, tail = [one_token(str(digit)) for digit in range(10)], one_token("+"), one_token(TAIL)
    start, opened, begun, closed, end = (
        one_token(text) for text in ("\n", "<tool_call>", HEAD, "</tool_call>", "<|im_end|>")
    )
    # Of each token, those that mostly come next, with their logits.
    follow = {start: {opened: 9}, opened: {begun: 9}, begun: dict.fromkeys(digits, 7), sign: dict.fromkeys(digits, 7)}
    follow |= {digit: {**dict.fromkeys(digits, 7), sign: 9, tail: 9} for digit in digits}
    follow |= {tail: {closed: 9}, closed: {end: 9}}
    for token, others in follow.items():
        for other, logit in others.items():
            head[other] += logit / len(embedding[token]) * embedding[token]
    return weights


@dataclass
class Spoken:
    """A run, and by its seed what the engine drew for each turn of an episode."""

    run: object
    drawn: dict


@pytest.fixture(scope="module")
def spoken(loop_run, small_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoken")
    (folder / "praised.py").write_text(ENVIRONMENT)
    asked = [(number, number * number % 23) for number in range(10, 50)]
    rows = [{"question": f"What is {one}+{other}?", "answer": f"#### {one + other}"} for one, other in asked]
    (folder / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    small = architecture_from_hf(json.loads((small_checkpoint / "config.json").read_text()), "config.json")
    architecture = replace(small, vocab_size=TOKENIZER.vocab_size, max_positions=1024)
    save_checkpoint(folder / "checkpoint", architecture, build_weights(architecture), TOKENIZER)
    settings = {
        **{"model": str(folder / "checkpoint"), "data.source": str(folder / "problems.jsonl")},
        **{"data.template": "{question}", "data.max_prompt_tokens": 800, "steps": 2},
        "environment": {"name": f"{folder / 'praised.py'}:Praised", "max_turns": 4, "turn_tokens": 16},
        **{"rollout.prompts_per_step": 2, "rollout.group_size": 3, "rollout.max_new_tokens": 128},
        **{"training.warmup_steps": 0, "training.learning_rate": 1e-3, "evaluation.prompts": 1},
    }
    add, step, seeds, drawn = EmbeddedSession.add, EmbeddedSession.step, {}, defaultdict(list)

    def watched_add(self, groups):
        for group in groups:
            for sample, seed in zip(group.samples, group.seeds, strict=True):
                seeds[self, group.group, sample] = seed
        add(self, groups)

    def watched_step(self):
        found = step(self)
        for done in found:
            drawn[seeds[self, done.group, done.sample]].append(done)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedSession, "add", watched_add)
        patch.setattr(EmbeddedSession, "step", watched_step)
        run = loop_run("spoken", shipped="gsm8k", **settings)
    return Spoken(run, drawn)


def test_what_was_drawn_is_stored_and_trained_on_whatever_its_text_encodes_to(spoken):
    run, others = spoken.run, 0
    for step in (1, 2):
        artifacts = run.ledger.artifacts(step)
        rollouts, trained, turns = (run.store.get_table(artifacts[name]) for name in ("rollouts", "logprobs", "turns"))
        for row, scored in zip(rollouts.to_pylist(), trained.to_pylist(), strict=True):
            place = row["group"], row["sample"]
            said = [turn for turn in turns.to_pylist() if (turn["group"], turn["sample"]) == place and turn["turn"]]
            for done, turn in zip(spoken.drawn[row["seed"]], said, strict=True):
                part = slice(turn["begin"], turn["end"])
                assert row["tokens"][part] == done.tokens
                assert row["logprobs"][part] == done.logprobs == scored["logprobs"][part]
                text = TOKENIZER.decode(done.tokens, special=True)
                # Bytes that are no text would not come back from any tokenizer.
                is_text = "\ufffd" not in text and bool(json.loads(turn["calls"]))
                others += is_text and TOKENIZER.encode(text) != done.tokens
        metrics = run.store.get_json(artifacts["metrics"])
        assert metrics["alignment/token_mult_prob_error"] == 1
        assert metrics["alignment/tokens_differing"] == 0
        assert metrics["environment/turns"] > 2
        assert metrics["environment/tool_calls"] > 1
        assert metrics["train/grad_norm"] > 0
    assert others > 5, "the calls that were drawn are what their texts encode to"


def test_a_replay_draws_the_same_tokens(spoken):
    folder = str(spoken.run.folder)
    assert main(["replay", folder, "--step", "2", "--trust"]) == 0
    assert main(["verify", folder]) == 0
