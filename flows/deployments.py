"""Deployments of `prefect.yaml`, as a server that may have them is to get them."""

from pathlib import Path

import yaml
from prefect.client.orchestration import SyncPrefectClient


def with_pauses_kept(client: SyncPrefectClient, source: Path) -> str:
    """The YAML of `source` for `prefect deploy`: a deployment that the server has keeps its schedules and its pause.

    `prefect deploy` would put declared schedules in place of those that a user has paused, changed or deleted since.
    """
    declared = yaml.safe_load(source.read_text("utf-8"))
    known = {(each.entrypoint, each.name): each for each in client.read_deployments()}
    for deployment in declared["deployments"]:
        if (had := known.get((deployment["entrypoint"], deployment["name"]))) is not None:
            deployment.pop("schedules", None)
            deployment["paused"] = had.paused
    return yaml.safe_dump(declared, sort_keys=False)
