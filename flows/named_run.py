"""The RUN argument of commands that look at a run or continue it."""

from pathlib import Path

from fp8core.config.run import RunConfig
from fp8core.errors import UserError
from fp8core.store.run_directory import RunDescription, read_description


def find_run(text: str) -> Path:
    """The absolute folder of a run: a path, or a name below ./runs.

    Raises:
        UserError: neither holds a run.
    """
    places = [Path(text), RunConfig.model_fields["runs"].default / text]
    for folder in places:
        if read_description(folder) is not None:
            return folder.absolute()
    raise UserError(f"{text}: no run (no run.json in {' or '.join(str(place.absolute()) for place in places)})")


def description_of(folder: Path) -> RunDescription:
    """The run.json of a folder that `find_run` found."""
    described = read_description(folder)
    assert described is not None, "find_run found it"
    return described
