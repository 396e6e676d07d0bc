import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, Experts
from fp8core.models.families import FAMILIES
from fp8core.models.families.config_json import BLOCK_FP8, architecture_from_hf, architecture_to_hf
from fp8core.numerics.rotary import LinearScaling, Llama3Scaling, YarnScaling

_COMMON = {"hidden_act": "silu", "num_key_value_heads": 8, "tie_word_embeddings": True}
LLAMA_32_1B = _COMMON | {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False},
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "head_dim": 64, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072},
    "rope_scaling": {
        **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "rope_theta": 500000.0,
}
QWEN3_06B = _COMMON | {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "head_dim": 128, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False},
}
QWEN25_05B = _COMMON | {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2},
    **{"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    **{"num_attention_heads": 14, "rms_norm_eps": 1e-06, "max_position_embeddings": 32768},
    **{"rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False},
}
MISTRAL_7B_V03 = _COMMON | {
    **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": None, "sliding_window": None},
    **{"vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "rope_theta": 1e6},
}
OLMO2_1B = _COMMON | {
    **{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False},
    **{"vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-06},
    **{"max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False},
}
QWEN3_30B_A3B = QWEN3_06B | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4},
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# As Qwen3's page says to change its config.json.
QWEN3_YARN = QWEN3_06B | {"rope_scaling": YARN}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_mistral_without_a_window_is_a_llama_by_another_name():
    arch = architecture_from_hf(MISTRAL_7B_V03, "config.json")
    llama = {**without(MISTRAL_7B_V03, "sliding_window"), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert replace(arch, family="llama") == architecture_from_hf(llama, "")


def test_transformers_5_keys_mean_the_same():
    llama = without(LLAMA_32_1B, "rope_theta", "rope_scaling")
    llama["rope_parameters"] = {**LLAMA_32_1B["rope_scaling"], "rope_theta": 500000.0}
    qwen3 = without(QWEN3_06B, "rope_theta", "rope_scaling")
    qwen3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "layer_types": ["full_attention"] * 28}
    assert architecture_from_hf(llama, "") == architecture_from_hf(LLAMA_32_1B, "")
    assert architecture_from_hf(qwen3, "") == architecture_from_hf(QWEN3_06B, "")


def test_yarn_has_the_positions_that_it_extends_to():
    arch = architecture_from_hf(QWEN3_YARN, "")
    assert arch.max_positions == 131072, "max_position_embeddings is what the model was trained with"
    assert architecture_from_hf(QWEN3_YARN | {"max_position_embeddings": 131072}, "") == arch
    # transformers takes the whole length for the original one where the file has none.
    short = architecture_from_hf(QWEN3_06B | {"rope_scaling": without(YARN, "original_max_position_embeddings")}, "")
    assert short.max_positions == 4 * QWEN3_06B["max_position_embeddings"]


def test_what_a_first_llama_leaves_out():
    first = without(
        LLAMA_32_1B, "head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings", "mlp_bias"
    )
    arch = architecture_from_hf(first, "")
    assert (arch.head_dim, arch.num_kv_heads, arch.rope_theta, arch.tie_embeddings) == (64, 32, 10_000.0, False)
    assert arch.rope_scaling is None


@pytest.mark.parametrize(
    ("base", "changes", "key"),
    [
        (LLAMA_32_1B, {"architectures": ["GemmaForCausalLM"]}, "architectures: found"),
        (LLAMA_32_1B, {"model_type": "mistral"}, "model_type: found"),
        (LLAMA_32_1B, {"attention_bias": True}, "attention_bias: found"),
        (LLAMA_32_1B, {"mlp_bias": True}, "mlp_bias: found"),
        (LLAMA_32_1B, {"hidden_act": "gelu"}, "hidden_act: found"),
        (QWEN3_06B, {"quantization_config": BLOCK_FP8}, "quantization_config: found"),
        (LLAMA_32_1B, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: found"),
        (LLAMA_32_1B, {"rope_scaling": YARN | {"factor": None}}, "factor: found nothing; expected a positive"),
        (LLAMA_32_1B, {"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast: found -1"),
        (LLAMA_32_1B, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "transformers cannot read it"),
        (without(MISTRAL_7B_V03, "sliding_window"), {}, "sliding_window: found"),
        (QWEN3_30B_A3B, {"use_sliding_window": True, "sliding_window": 16}, "sliding_window: found"),
        (QWEN25_05B, {"use_sliding_window": True, "max_window_layers": 9}, "layer_types: found"),
        (QWEN25_05B, {"head_dim": 128}, "head_dim: found"),
        (QWEN3_06B, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: found"),
        (QWEN3_06B, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types: found"),
        (QWEN3_06B, {"num_key_value_heads": 3}, "num_key_value_heads: found"),
        (QWEN3_06B, {"vocab_size": "151936"}, "vocab_size: found"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok: found"),
        (QWEN3_06B, {"rms_norm_eps": None}, "rms_norm_eps: found nothing"),
        (QWEN3_06B, {"tie_word_embeddings": "no"}, "transformers cannot read it"),
    ],
)
def test_unsupported_is_refused_by_file_and_key(base, changes, key):
    with pytest.raises(UserError) as refused:
        architecture_from_hf({**base, **changes}, "there/config.json")
    assert str(refused.value).startswith(f"there/config.json: {key}")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


factors = st.floats(1, 64)
originals = st.integers(8, 8192)
scalings = st.one_of(
    st.builds(LinearScaling, factor=factors),
    st.builds(
        Llama3Scaling,
        factor=factors,
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
        original_max_position_embeddings=originals,
    ),
    st.builds(
        YarnScaling,
        factor=factors,
        original_max_position_embeddings=originals,
        beta_fast=st.floats(8, 64),
        attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.floats(0.5, 2),
        truncate=st.booleans(),
    ),
)


mixtures = st.builds(
    Experts,
    count=st.integers(8, 512),
    per_token=st.integers(1, 8),
    intermediate_size=st.integers(1, 4096),
    normalise_top_k=st.booleans(),
    sparse_step=st.integers(1, 4),
    dense_layers=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@st.composite
def architectures(draw):
    family = draw(st.sampled_from(list(FAMILIES)))
    scaling = draw(st.none() | scalings)
    positions = scaling.max_positions if isinstance(scaling, YarnScaling) else draw(st.integers(16_384, 1 << 20))
    kv_heads, groups, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 8)), 2 * draw(st.integers(1, 64))
    return Architecture(
        family=family,
        vocab_size=draw(st.integers(1, 200_000)),
        hidden_size=kv_heads * groups * (head_dim if family == "qwen2" else draw(st.integers(1, 128))),
        intermediate_size=draw(st.integers(1, 20_000)),
        num_layers=draw(st.integers(1, 100)),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=draw(st.floats(1e-8, 1e-3)),
        rope_theta=draw(st.floats(1e2, 1e8)),
        max_positions=positions,
        rope_scaling=scaling,
        tie_embeddings=draw(st.booleans()),
        experts=draw(mixtures) if family == "qwen3_moe" else None,
    )


@given(architectures())
def test_written_and_read_back(arch):
    written = architecture_to_hf(arch, bos_id=None, eos_ids={1, 2}, pad_id=0, dtype="bfloat16")
    assert architecture_from_hf(json.loads(json.dumps(written)), "") == arch
    for old in (without(written, "rope_parameters"), without(written, "rope_theta", "rope_scaling")):
        assert architecture_from_hf(old, "") == arch


@pytest.mark.parametrize(
    "config",
    [LLAMA_32_1B, MISTRAL_7B_V03, OLMO2_1B, QWEN25_05B, QWEN3_06B, QWEN3_30B_A3B, QWEN3_YARN],
    ids=["llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3-moe", "qwen3-yarn"],
)
def test_transformers_reads_what_is_written(config, tmp_path: Path):
    arch = architecture_from_hf(config, "")
    written = architecture_to_hf(arch, bos_id=1, eos_ids={7, 5}, pad_id=3, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "original.json").write_text(json.dumps(config))
    original = AutoConfig.from_pretrained(tmp_path / "original.json")
    assert getattr(read, "sliding_window", None) is None
    assert getattr(original, "head_dim", None) in (None, read.head_dim)
    for key in ("rope_parameters", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(read, key) == getattr(original, key), key
    assert type(read) is type(original)
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers")
    for key in experts if "num_experts" in config else ():
        assert getattr(read, key) == config[key], key
    assert (read.eos_token_id, read.bos_token_id, read.pad_token_id) == ([5, 7], 1, 3)
    assert str(read.dtype) == "torch.bfloat16"
