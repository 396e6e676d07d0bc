"""Settings of the services that show a run."""

import re
from typing import Annotated

from pydantic import Field, field_serializer, field_validator

from fp8core.config.section import Section, choice_of
from fp8core.config.shipped import TRACKERS
from fp8core.errors import without_passwords

_STORE = re.compile(r"https?://[^/]|(sqlite|postgresql|mysql|mssql)(\+\w+)?://.|databricks")


class TrackingConfig(Section):
    """Services that show a run. `tracking: [mlflow, wandb]` is short for its `services`."""

    services: tuple[Annotated[str, choice_of(TRACKERS, "TRACKER")], ...] = Field(
        ("mlflow",), description=f"Any of {', '.join(TRACKERS)}, or a `module:TRACKER` of your own."
    )
    uri: str | None = Field(
        None, description="MLflow's server or store; null: MLFLOW_TRACKING_URI, else sqlite beside the runs."
    )
    experiment: str = Field("fp8-grpo", min_length=1, description="MLflow's experiment, W&B's project.")
    system_metrics: bool = Field(True, description="Log the load of CPU, memory, disk and GPUs (system/...).")

    @field_validator("uri")
    @classmethod
    def _names_a_store(cls, uri: str | None) -> str | None:
        if uri is not None and not _STORE.match(uri):
            raise ValueError("expected http(s)://HOST, sqlite:///FILE, postgresql://..., mysql://..., mssql://...")
        return uri

    @field_serializer("uri")
    def _without_password(self, uri: str | None) -> str | None:
        # A dump goes to run.json, to MLflow and to reports.
        return None if uri is None else without_passwords(uri)
