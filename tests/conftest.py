"""Fixtures for the whole suite."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.tokenizer import Tokenizer

_VOCAB_SIZE = 512

_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_PROBLEMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} had {a} {things} and gave away {b} of them. How many {things} are left?",
    "There are {a} boxes with {b} {things} in each. How many {things} does {name} count in all?",
    "{name} earns {a} dollars an hour and works {b} hours a day. How much does {name} earn in 5 days?",
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def word_problems() -> Iterator[str]:
    """A few dozen short word problems, always the same."""
    people = itertools.product(("Tom", "Maria", "Wei", "Amina"), ("apples", "pencils", "marbles"))
    for i, ((name, things), problem) in enumerate(itertools.product(people, _PROBLEMS)):
        a, b = 17 + 13 * i % 83, 2 + 7 * i % 15
        yield problem.format(name=name, things=things, a=a, b=b) + f"\n{a} and {b} give the answer.\n#### {a + b}"


@pytest.fixture(scope="session")
def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer trained on word problems, with a chat template in the manner of Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(word_problems(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend, config, frozenset(), _CHAT_TEMPLATE, "test tokenizer")


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Tokenizer) -> Path:
    """A folder with a Qwen3-shaped checkpoint: random BF16 weights, a real tokenizer and a chat template."""
    architecture = Architecture(
        family="qwen3",
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=512,
        rope_scaling=None,
        qk_norm=True,
        tie_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    save_checkpoint(folder, architecture, random_weights(architecture, seed=0), bpe_tokenizer)
    return folder


def random_weights(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """FP32 weights: norms about one, the rest normal with deviation `1 / sqrt(inputs)`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(architecture).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
    return weights


@pytest.fixture(scope="session")
def readme_commands() -> list[str]:
    """Every line of the README's `sh` blocks, in order."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = text.split("```sh\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines() if line.strip()]
