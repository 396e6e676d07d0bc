"""What `fp8-grpo up` deploys on a server that has been used."""

from pathlib import Path

import yaml
from prefect.client.orchestration import get_client

from flows.deployments import with_pauses_kept

DECLARED = Path(__file__).parents[2] / "prefect.yaml"


def test_a_deployment_that_the_server_has_keeps_its_schedules_and_its_pause(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        assert yaml.safe_load(with_pauses_kept(client, DECLARED)) == yaml.safe_load(DECLARED.read_text())
        flow = client.create_flow_from_name("fp8-parity")
        made = client.create_deployment(flow, "nightly", entrypoint="flows.parity:parity", paused=True)
        try:
            deployed = yaml.safe_load(with_pauses_kept(client, DECLARED))["deployments"]
        finally:
            client.delete_deployment(made)
    declared = yaml.safe_load(DECLARED.read_text())["deployments"]
    for one, other in zip(deployed, declared, strict=True):
        changed = {} if one["name"] != "nightly" else {"schedules": None, "paused": True}
        assert {"schedules": None, **one} == {"schedules": None, **other, **changed}
