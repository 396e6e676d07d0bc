"""A step of the user's own that stores the call stack within its body."""

import traceback

from fp8core.config.steps import NoOptions
from fp8core.run.context import StepContext
from fp8core.store.artifacts import Ref
from tasks.step import step


@step(inputs={"rollouts": "rollouts"}, outputs={"frames": "frames"})
def frames(run: StepContext, index: int, options: NoOptions, rollouts: Ref) -> dict[str, Ref]:
    """Store [file, function] of every frame, the outermost first."""
    stack = [[frame.filename, frame.name] for frame in traceback.extract_stack()]
    return {"frames": run.store.put_json("frames", stack)}
