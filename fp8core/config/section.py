"""The base of every configuration section: immutable, closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a wrong type is refused when it is read."""

    # An infinite number could not be read back from a run.json.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
