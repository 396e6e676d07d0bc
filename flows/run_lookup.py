"""Find the run that a user names, maybe somebody else's, and the configuration that it continues with."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flows.environment import search_last
from flows.launch import say
from fp8core.config.load import Overrides, load_config, reload_config
from fp8core.config.run import RunConfig, own_code, public_dump
from fp8core.errors import UserError, did_you_mean, printable

if TYPE_CHECKING:
    from fp8core.store.run_directory import RunDescription


def find_run(text: str) -> Path:
    """The absolute folder of a run: a path, or a name below ./runs. Raises UserError: neither is one."""
    from fp8core.store.layout import DESCRIPTION
    from fp8core.store.run_directory import read_description  # Imports torch.

    runs: Path = RunConfig.model_fields["runs"].default
    places = [Path(text), runs / text]
    for folder in places:
        if read_description(folder) is not None:
            # Without `..`: the folder's store is named without it, too.
            return Path(os.path.abspath(folder))
    absolute_places = dict.fromkeys(str(place.absolute()) for place in places)  # One, where RUN is an absolute path.
    names = sorted(path.parent.name for path in runs.glob(f"*/{DESCRIPTION}"))
    near = did_you_mean(text, names) if os.sep not in text else ""
    raise UserError(f"{text}: no run (no run.json in {' or '.join(absolute_places)}){near}")


def load_settings(config: str, overrides: Overrides) -> RunConfig:
    """The configuration of a shipped name, of a file, or of the folder of a run that is continued as it was begun."""
    from fp8core.store.layout import LEDGER
    from fp8core.store.ledger import LedgerView
    from fp8core.store.run_directory import read_description  # Imports torch.

    folder = Path(config).absolute()
    description = read_description(folder) if os.sep in config else None
    if description is None:
        return load_config(config, overrides)
    segment = LedgerView.read(folder / LEDGER).last_segment() if (folder / LEDGER).exists() else None
    if segment is not None and segment.steps is not None:
        # A run that was extended stays so, unless the overrides say otherwise.
        longer = {**description.config, "steps": max(segment.steps, reload_config(description.config).steps)}
        description = description.model_copy(update={"config": longer})
    settings = reload_own(description, overrides)
    for key in ("run", "runs"):
        if public_dump(settings)[key] != description.config[key]:
            raise UserError(f"{key}: {folder} is continued under its name and where it lies; leave {key} as it is")
    return settings.model_copy(update={"run": folder.name, "runs": folder.parent})


def reload_own(description: "RunDescription", overrides: Overrides) -> RunConfig:
    """The configuration of a run's folder with overrides; the tracking store is the user's choice alone."""
    if isinstance(overrides, Mapping):
        return reload_config(description.config, {"tracking.uri": None, **overrides})
    return reload_config(description.config, ["tracking.uri=null", *overrides])


def description_of(folder: Path) -> "RunDescription":
    from fp8core.store.run_directory import stored_description  # Imports torch.

    return stored_description(folder)


def enter_origin(folder: Path) -> None:
    """Go where a run was begun, from where its configuration names the user's files and code, if that is here."""
    begun_in = Path(description_of(folder).begun_in)
    if begun_in.is_dir():
        os.chdir(begun_in)


def admit_code(folder: Path, overrides: Overrides, work_folder: Path, *, trust: bool) -> None:
    """Say which code a run's configuration makes a command run, and let it be found.

    Code of `overrides` needs no trust. Modules of the user's own are found in `work_folder`,
    after the working directory.
    Raises UserError: there is such code, or a cluster that would be joined, and no trust.
    """
    stored_config = description_of(folder).config
    code = own_code(reload_config(stored_config))
    if code:
        code_settings = printable(", ".join(f"{key}={value}" for key, value in code.items()))
        if not trust:
            raise UserError(
                f"{folder}: its run.json names code to run or servers to ask: {code_settings}; --trust allows it"
            )
        say(f"{folder}: uses code or servers that its run.json names: {code_settings}", sys.stderr)
    if code or own_code(reload_config(stored_config, overrides)):
        search_last(Path.cwd())
        search_last(work_folder)
