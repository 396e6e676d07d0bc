"""Checkpoints that transformers itself has made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fp8core.models.tokenizer import Tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "dtype": "float32",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _llama(**overrides: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **overrides}))


def _mistral(**overrides: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**_SHAPE, **overrides}))


def _olmo2(**overrides: Any) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**{**_SHAPE, **overrides}))


def _qwen2(**overrides: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **overrides}))


def _qwen3(**overrides: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 24, **overrides}))


def _qwen3_moe(**overrides: Any) -> PreTrainedModel:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_SHAPE, **sizes, **overrides}))


_MODELS = {
    "llama": lambda: _llama(),
    "llama-3.2": lambda: _llama(
        rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True, num_key_value_heads=1, head_dim=64
    ),
    "smollm2": lambda: _llama(
        tie_word_embeddings=True, hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=320
    ),
    "mistral": lambda: _mistral(sliding_window=None, head_dim=24),
    "olmo2": lambda: _olmo2(rms_norm_eps=1e-6, eos_token_id=None, pad_token_id=None),
    "qwen2.5": lambda: _qwen2(
        tie_word_embeddings=True,
        hidden_size=112,
        num_attention_heads=7,
        num_key_value_heads=1,
        use_sliding_window=False,
    ),
    "qwen3": lambda: _qwen3(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-yarn": lambda: _qwen3(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
    ),
    "qwen3-moe": lambda: _qwen3_moe(norm_topk_prob=True, head_dim=24),
    "qwen3-moe-mixed": lambda: _qwen3_moe(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], num_experts_per_tok=3
    ),
}


@dataclass(frozen=True)
class TransformersCheckpoint:
    """A model and the folder it was saved to, in one weights file or several."""

    model: PreTrainedModel
    folder: Path
    sharded: bool

    @staticmethod
    def unfused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names in a file; in memory transformers 5 fuses gate and up, and the experts of a layer."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            stem, _, projection = name.rpartition(".experts.")
            if not stem:
                found[name] = tensor
            elif projection == "down_proj":
                found |= {f"{stem}.experts.{e}.down_proj.weight": part for e, part in enumerate(tensor)}
            else:
                for e, part in enumerate(tensor):
                    gate, up = part.chunk(2)
                    found |= {f"{stem}.experts.{e}.{half}_proj.weight": x for half, x in (("gate", gate), ("up", up))}
        return found


@pytest.fixture(scope="session", params=list(_MODELS))
def transformers_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Tokenizer
) -> TransformersCheckpoint:
    """Random FP32 models of all families; the untied Qwen3 is split over several files."""
    torch.manual_seed(0)
    model = _MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.2)
    folder, sharded = tmp_path_factory.mktemp(request.param), request.param == "qwen3"
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    bpe_tokenizer.save(folder)
    return TransformersCheckpoint(model, folder, sharded)
