"""Names that a configuration can give to what the package ships, with where that is: no code of the user's own.

Child processes that run an environment import this module, hence it imports nothing.
"""

from collections.abc import Mapping
from typing import Final

ENGINES: Final[Mapping[str, str]] = {
    "embedded": "fp8core.rollout.embedded:ENGINE",
    "vllm": "fp8core.rollout.vllm.entry:ENGINE",
    "sglang": "fp8core.rollout.sglang.entry:ENGINE",
}
"""Name in `rollout.engine` -> import path of its entry."""
OPTIMISERS: Final[Mapping[str, str]] = {
    "adamw": "fp8core.training.optimisers.adamw:OPTIMISER",
    "muon": "fp8core.training.optimisers.muon:OPTIMISER",
}
"""Name in `training.optimiser.name` -> import path of its entry."""
TRACKERS: Final[Mapping[str, str]] = {
    "mlflow": "flows.tracking.mlflow_tracker:TRACKER",
    "wandb": "flows.tracking.wandb_tracker:TRACKER",
    "tensorboard": "flows.tracking.tensorboard_tracker:TRACKER",
}
"""Name in `tracking.services`, which is that of the package it needs -> import path of its entry."""
SHIPPED_ENVIRONMENTS: Final[Mapping[str, str]] = {"calculator": "Calculator", "python": "Python"}
"""Name in `environment.name` -> its class in fp8core/environments/shipped.py."""
SHIPPED_VERIFIERS: Final = ("chain", "integer", "math-verify", "format", "judge", "reward_model")
"""Names in `reward.verifier`; fp8core/rewards/verifier.py makes them."""
REFERENCE: Final = "tasks.reference:reference"
TEACHER: Final = "tasks.teacher:teacher"
FILTER: Final = "tasks.filter:filter"


def is_shipped(path: str) -> bool:
    """True for the import path of something in this project's own steps, which anybody may import."""
    return path.startswith("tasks.") and path.partition(":")[0].count(".") == 1
