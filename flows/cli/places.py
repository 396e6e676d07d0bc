"""Where a setting was written, for refusals that come after its configuration was read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fp8core.config.load import written_places
from fp8core.errors import UserError

_KEY = re.compile(r"([a-z_]\w*(?:\.[\w-]+)*)(?:=|:|,| needs)")
_STEP = re.compile(r"step (\w+): (.*)")
_PARTS = (("needs", r"needs|input"), ("provides", r"output|provides"), ("uses", ""))
"""Parts of a step, with words of a message about each."""


@contextmanager
def placed(config: str, overrides: Sequence[str]) -> Iterator[None]:
    """Add `(--set)` or `(file:line)` to a UserError of the block whose message begins with a setting or a step."""
    try:
        yield
    except UserError as error:
        # A damaged file of a run is no setting, and names its own place.
        place = _place(str(error), written_places(config, overrides)) if type(error) is UserError else None
        if place is None:
            raise
        raise UserError(f"{error} ({place})") from error


def _place(message: str, written: Mapping[str, str]) -> str | None:
    if "; also " in message or message.endswith(tuple(f"({place})" for place in written.values())):
        return None
    if (step := _STEP.match(message)) is not None:
        # An import path may hold any of the words.
        parts = ["uses"] if step[2].startswith("uses ") else [part for part, word in _PARTS if re.search(word, step[2])]
        return next(filter(None, (written.get(f"pipeline.steps.{step[1]}.{part}") for part in parts)), None)
    key = _KEY.match(message)
    return None if key is None else written.get(key[1])
