"""What the pages of a resumed flow show of the steps that were taken before."""

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from waiting import wait_for

from fp8core.store.run_directory import read_description


def test_a_resumed_flow_shows_what_it_takes_from_the_ledger_as_cached(launch, loop_run, mlflow_store):
    run = loop_run("stored", steps=1)
    run.cut_after(1, "rollout")
    launch("stored", steps=1, overrides={"runs": str(mlflow_store(run.folder.parent))})
    of_run = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run-{read_description(run.folder).id}"]))
    with get_client(sync_client=True) as client:

        def states():
            return {each.name: each.state_name for each in client.read_task_runs(flow_run_filter=of_run)}

        wait_for(lambda: states().get("commit-1") == "Completed", "the end of the step", 30)
        shown = states()
    assert [shown[f"{name}-1"] for name in ("prompts", "rollout", "reward")] == ["Cached", "Cached", "Completed"]
