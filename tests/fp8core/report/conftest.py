"""A run whose two policies differ, so that there is a mismatch to see."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def mixed_run(loop_run: Callable[..., Any]) -> Any:
    """A run of 4 steps that samples in FP8 and trains in BF16; for reading only."""
    return loop_run("mixed", **{"precision.training.linear": "bf16"})
