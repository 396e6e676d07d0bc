"""The shape of a configuration's model, without its weights."""

from pathlib import Path

from fp8core.config.load import UNDECIDED
from fp8core.config.run import RunConfig
from fp8core.data.chain import VOCABULARY
from fp8core.errors import UserError
from fp8core.input_file import read_json_object
from fp8core.models.architecture import Architecture, Experts, RopeScaling, architecture_from_hf
from fp8core.models.checkpoint import architecture_from_config
from fp8core.models.hub import resolve_model

_QWEN3_8B = Architecture(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=32_768,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
)
_QWEN3_30B_A3B = Architecture(
    family="qwen3_moe",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=40_960,
    rope_scaling=None,
    qk_norm=True,
    tie_embeddings=False,
    experts=Experts(
        count=128, per_token=8, intermediate_size=768, normalise_top_k=True, sparse_step=1, dense_layers=()
    ),
)
_LLAMA_31_8B = Architecture(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_positions=131_072,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
    qk_norm=False,
    tie_embeddings=False,
)

# The config.json of models that configurations here name, so that a plan needs no network and no licence.
PUBLISHED = {
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31_8B,
}


def model_shape(config: RunConfig) -> Architecture:
    """The decoder that a run would load or build.

    Raises:
        UserError: no model is chosen, or its config.json is missing, unreadable or of another kind of model.
    """
    if config.architecture is not None:
        return architecture_from_config(config.architecture, VOCABULARY)
    assert config.model is not None, "RunConfig demands a model or an architecture"
    if config.model == UNDECIDED:
        raise UserError("model: not set; add --set model=FOLDER_OR_HUB_ID")
    if config.model in PUBLISHED and config.revision is None and not Path(config.model).is_dir():
        return PUBLISHED[config.model]
    folder = resolve_model(config.model, config.revision, files=["config.json"]).folder
    return architecture_from_hf(read_json_object(folder / "config.json"), str(folder / "config.json"))
