"""Find the run that a user names (a name below ./runs, or a folder), and the configuration it continues with."""

import os
from collections.abc import Mapping
from pathlib import Path

from fp8core.config.load import Overrides, load_config, reload_config
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError, not_unicode
from fp8core.store.run_directory import RunDescription, read_description


def find_run(text: str) -> Path:
    """The absolute folder of a run: a path, or a name below ./runs.

    Raises:
        UserError: neither holds a run.
    """
    if not_unicode(text) is not None:
        raise UserError(f"RUN {text!a}: the name is not valid text")
    places = [Path(text), RunConfig.model_fields["runs"].default / text]
    for folder in places:
        if read_description(folder) is not None:
            return folder.absolute()
    raise UserError(f"{text}: no run (no run.json in {' or '.join(str(place.absolute()) for place in places)})")


def load_settings(config: str, overrides: Overrides) -> RunConfig:
    """The configuration of a shipped name, of a file, or of the folder of a run that is continued as it was begun.

    Raises:
        UserError: as `load_config` and `reload_config`; or an override renames or moves a run that exists.
    """
    folder = Path(config).absolute()
    described = read_description(folder) if os.sep in config else None
    if described is None:
        return load_config(config, overrides)
    kept = reload_own(described, overrides)
    for key in ("run", "runs"):
        if public_dump(kept)[key] != described.config[key]:
            raise UserError(f"{key}: {folder} is continued under its name and where it lies; leave {key} as it is")
    return kept.model_copy(update={"run": folder.name, "runs": folder.parent})


def reload_own(described: RunDescription, overrides: Overrides) -> RunConfig:
    """The configuration of a run's folder with overrides; the tracking store is the user's choice alone.

    A folder may be somebody else's, and MLflow would send the user's credentials to the store that it names.
    """
    if isinstance(overrides, Mapping):
        return reload_config(described.config, {"tracking.uri": None, **overrides})
    return reload_config(described.config, ["tracking.uri=null", *overrides])


def description_of(folder: Path) -> RunDescription:
    """The run.json of a folder that `find_run` found."""
    described = read_description(folder)
    assert described is not None, "find_run found it"
    return described
