"""The functions of the project between the loop of a training and the body of a step."""

from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from waiting import wait_for

from fp8core.store.artifacts import ArtifactStore
from fp8core.store.run_directory import read_description

ROOT = Path(__file__).parents[2]
BODY = {"name": "frames", "uses": "tests.parts.frames_step:frames", "needs": ["rollouts"]}
SETTINGS = {"pipeline": {"insert": [{"after": "rollout", "step": BODY}]}}


def frames_of(folder, ledger):
    """Of the step that stored its call stack: the project's functions from the loop on, other libraries left out."""
    stack = ArtifactStore(folder).get_json(ledger.artifacts(1)["frames"])
    files = [Path(file) for file, _ in stack]
    own = [any(ROOT / part in file.parents for part in ("fp8core", "flows", "tests/parts")) for file in files]
    names = [name for (_, name), ours in zip(stack, own, strict=True) if ours]
    return names[names.index("_train") :]


def test_a_reader_passes_four_functions_from_the_loop_to_a_body(loop_run):
    run = loop_run("frames", steps=1, **SETTINGS)
    assert frames_of(run.folder, run.ledger) == ["_train", "iterate", "run_step", "frames"]


def test_prefect_lies_between_the_same_functions(launch):
    done = launch("frames", steps=1, overrides=SETTINGS)
    assert frames_of(done.folder, done.ledger) == ["_train", "iterate", "run_step", "frames"]


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
