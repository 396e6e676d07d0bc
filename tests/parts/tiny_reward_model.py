"""A random sequence classifier in a folder: the shape of a reward model, and nothing that it has learnt."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from fp8core.models.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def save_reward_model(folder: Path, tokenizer: Tokenizer, seed: int = 0, labels: int = 1) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=tokenizer.pad_id,
        num_labels=labels,
        initializer_range=0.3,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
