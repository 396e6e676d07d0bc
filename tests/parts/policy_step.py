"""A step that asks the engine, and reads the policy which an iteration starts from, and its scales."""

from fp8core.config.steps import NoOptions
from fp8core.rollout.engine import Probe
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={"policy": "policy", "scales": "scales"}, outputs={"looked_at": "looked_at"})
def look(run: StepContext, index: int, options: NoOptions, policy: Ref, scales: Ref) -> dict[str, Ref]:
    """Note the version, and what the engine gives for a token."""
    version = run.store.get_json(policy)["version"]
    scores = run.engine.score([Probe((3, 4, 5), 6)], 1.0)
    return {"looked_at": run.store.put_json("looked_at", {"version": version, "scores": scores})}
