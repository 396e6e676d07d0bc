"""The model that `model:` names: its folder, or a Hugging Face hub id pinned to a commit, and its shape alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8core.config.run import RunConfig
from fp8core.errors import UserError, first_line, nearest
from fp8core.models.architecture import Architecture, Experts, RopeScaling
from fp8core.models.checkpoint import architecture_from_config
from fp8core.models.families.config_json import architecture_from_hf
from fp8core.user_files import read_json_object

_FILES = ["*.safetensors", "*.json", "*.jinja"]
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class ResolvedModel:
    """A folder on this machine; `revision` is the commit of a hub model, None for a folder."""

    folder: Path
    revision: str | None


def resolve_model(
    model: str, revision: str | None, cache: Path | None = None, files: Sequence[str] = _FILES, key: str = "model"
) -> ResolvedModel:
    """Find a checkpoint, downloading it when it is a hub id; without an answer, an earlier download is used.

    `model`: a folder, or a hub id such as `Qwen/Qwen3-0.6B`. `revision`: branch, tag or commit; None for the main
    branch. Raises UserError: no such folder, model or revision, or neither network nor a cached copy."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            setting = f"{key.rpartition('.')[0]}.revision".removeprefix(".")
            raise UserError(f"{setting}={revision} applies to hub ids, but {key}={model} is a folder")
        if not (folder / "config.json").exists():
            raise UserError(f"{key}={model}: the folder holds no checkpoint (no config.json)")
        return ResolvedModel(folder, None)
    if model.startswith(("/", ".", "~")) or model.count("/") != 1 or folder.exists():
        near = nearest(folder.name, (config.parent.name for config in folder.parent.glob("*/config.json")))
        hint = "" if near is None else f"; did you mean {folder.with_name(near)}?"
        raise UserError(f"{key}={model}: no such folder, and not a hub id of the form OWNER/NAME{hint}")
    snapshot = _snapshot(model, revision, cache, files, key)
    return ResolvedModel(snapshot, snapshot.name)


def _snapshot(model: str, revision: str | None, cache: Path | None, files: Sequence[str], key: str) -> Path:
    """The cache's folder of one commit, by whose name it goes."""
    # Not above: a run whose model is in a folder does without.
    from huggingface_hub import HfApi, errors, snapshot_download

    # The base of connection errors in whichever HTTP library this version of huggingface_hub uses.
    connection: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    patterns = list(files)
    try:
        # Asked apart, because snapshot_download retries for half a minute when it is given a commit and no network.
        commit = HfApi().model_info(model, revision=revision, timeout=_ANSWER_SECONDS).sha
        return Path(snapshot_download(model, revision=commit, cache_dir=cache, allow_patterns=patterns))
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.GatedRepoError,
        errors.HFValidationError,
    ) as error:
        raise UserError(
            f"{key}={model}: neither a folder nor a model that the hub shows you (a private or gated one needs "
            f"`hf auth login`): {first_line(error)}"
        ) from error
    except (connection, OSError) as error:
        reason = first_line(error)
    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, allow_patterns=patterns, local_files_only=True)
        )
    except errors.LocalEntryNotFoundError as error:
        at = "" if revision is None else f" --revision {revision}"
        raise UserError(
            f"{key}={model}: not in the cache, and the hub did not answer ({reason}): on a machine with network run "
            f"`hf download {model}{at} --local-dir FOLDER`, then pass `--set {key}=FOLDER`"
        ) from error


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
    tie_embeddings=False,
)
_QWEN3_30B_A3B = replace(
    _QWEN3_8B,
    family="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    max_positions=40_960,
    experts=Experts(
        count=128, per_token=8, intermediate_size=768, normalise_top_k=True, sparse_step=1, dense_layers=()
    ),
)
_LLAMA_31_8B = replace(
    _QWEN3_8B,
    family="llama",
    vocab_size=128_256,
    intermediate_size=14_336,
    num_layers=32,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_positions=131_072,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
)

# The config.json of models that configurations here name, so that a plan needs no network and no licence.
PUBLISHED = {
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31_8B,
}


def model_shape(config: RunConfig) -> Architecture:
    """The decoder that a run would load or build.
    Raises UserError: no model is chosen, or its config.json is missing, unreadable or of another kind of model."""
    if config.architecture is not None:
        return architecture_from_config(config.architecture, config.data.vocabulary_size)
    assert config.model is not None, "RunConfig demands a model or an architecture"
    if config.model in PUBLISHED and config.revision is None and not Path(config.model).is_dir():
        return PUBLISHED[config.model]
    folder = resolve_model(config.model, config.revision, files=["config.json"]).folder
    return architecture_from_hf(read_json_object(folder / "config.json"), str(folder / "config.json"))
