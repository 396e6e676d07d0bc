"""The model that `model:` names: its folder, or a Hugging Face hub id pinned to a commit, and its shape alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from fp8core.config.run import RunConfig
from fp8core.errors import UserError, first_line, nearest
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import architecture_from_config
from fp8core.models.families.config_json import architecture_from_hf
from fp8core.user_files import read_json_object

CHECKPOINT_FILES = ["*.safetensors", "*.json", "*.jinja"]
"""Names of the files of a checkpoint that are read."""
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class ResolvedModel:
    """A folder on this machine; `revision` is the commit of a hub model, None for a folder."""

    folder: Path
    revision: str | None


def resolve_model(
    model: str, revision: str | None, files: Sequence[str] = CHECKPOINT_FILES, key: str = "model"
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
    snapshot = _snapshot(model, revision, files, key)
    return ResolvedModel(snapshot, snapshot.name)


def _snapshot(model: str, revision: str | None, files: Sequence[str], key: str) -> Path:
    """The cache's folder of one commit, by whose name it goes."""
    # Not above: a run whose model is in a folder does without.
    from huggingface_hub import HfApi, errors, snapshot_download

    # The base of connection errors in whichever HTTP library this version of huggingface_hub uses.
    connection: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    patterns = list(files)
    try:
        # Asked apart, because snapshot_download retries for half a minute when it is given a commit and no network.
        commit = HfApi().model_info(model, revision=revision, timeout=_ANSWER_SECONDS).sha
        return Path(snapshot_download(model, revision=commit, allow_patterns=patterns))
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
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        at = "" if revision is None else f" --revision {revision}"
        raise UserError(
            f"{key}={model}: not in the cache, and the hub did not answer ({reason}): on a machine with network run "
            f"`hf download {model}{at} --local-dir FOLDER`, then pass `--set {key}=FOLDER`"
        ) from error


# Shapes of models that configurations here name, so that a plan needs no network and no licence.
HUB_ARCHITECTURES = TypeAdapter(dict[str, Architecture]).validate_python(
    yaml.safe_load(Path(__file__).with_name("published.yaml").read_text("utf-8"))
)


def model_shape(config: RunConfig) -> Architecture:
    """The decoder that a run would load or build.
    Raises UserError: no model is chosen, or its config.json is missing, unreadable or of another kind of model."""
    if config.architecture is not None:
        return architecture_from_config(config.architecture, config.vocabulary_size)
    assert config.model is not None, "RunConfig demands a model or an architecture"
    if config.model in HUB_ARCHITECTURES and config.revision is None and not Path(config.model).is_dir():
        return HUB_ARCHITECTURES[config.model]
    folder = resolve_model(config.model, config.revision, files=["config.json"]).folder
    return architecture_from_hf(read_json_object(folder / "config.json"), str(folder / "config.json"))
