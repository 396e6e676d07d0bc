"""The folder that `model:` names: a local folder, or a Hugging Face hub id pinned to a commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fp8core.errors import UserError

_FILES = ["*.safetensors", "*.json", "*.jinja"]
_ANSWER_SECONDS = 5.0

# The base of connection errors in whichever HTTP library this version of huggingface_hub uses.
_HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ResolvedModel:
    """A folder on this machine; `revision` is the commit of a hub model, None for a folder."""

    folder: Path
    revision: str | None


def resolve_model(
    model: str, revision: str | None, cache: Path | None = None, files: Sequence[str] = _FILES
) -> ResolvedModel:
    """Find a checkpoint, downloading it when it is a hub id.

    The token, the endpoint and offline mode are huggingface_hub's own settings. When the hub does not answer, what
    an earlier download left in the cache is used.

    Args:
        model: A folder, or a hub id such as `Qwen/Qwen3-0.6B`.
        revision: Branch, tag or commit of a hub id; None for its main branch.
        cache: The hub's cache folder; None for huggingface_hub's own.
        files: Shell patterns of the files to download.

    Raises:
        UserError: no such folder, no such model or revision, or neither network nor a cached copy.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"revision={revision} applies to hub ids, but model={model} is a folder")
        return ResolvedModel(folder, None)
    if model.startswith(("/", ".", "~")) or model.count("/") != 1 or folder.exists():
        raise UserError(f"model={model}: no such folder, and not a hub id of the form OWNER/NAME")
    snapshot = _snapshot(model, revision, cache, files)
    return ResolvedModel(snapshot, snapshot.name)


def _snapshot(model: str, revision: str | None, cache: Path | None, files: Sequence[str]) -> Path:
    """The cache's folder of one commit, which is named by the commit."""
    try:
        # Asked apart, because snapshot_download retries for half a minute when it is given a commit and no network.
        commit = HfApi().model_info(model, revision=revision, timeout=_ANSWER_SECONDS).sha
        return Path(snapshot_download(model, revision=commit, cache_dir=cache, allow_patterns=list(files)))
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError) as error:
        raise UserError(
            f"model={model}: neither a folder nor a model that the hub shows you (a private or gated one needs "
            f"`hf auth login`): {_first_line(error)}"
        ) from error
    except (_HTTPError, OSError) as error:
        return _cached(model, revision, cache, _first_line(error))


def _cached(model: str, revision: str | None, cache: Path | None, reason: str) -> Path:
    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=cache, allow_patterns=_FILES, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        at = "" if revision is None else f" --revision {revision}"
        raise UserError(
            f"model={model}: not in the cache, and the hub did not answer ({reason}): on a machine with network run "
            f"`hf download {model}{at} --local-dir FOLDER`, then pass `--set model=FOLDER`"
        ) from error
    return Path(found)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
