"""A wait for what another thread or process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str = "it", seconds: float = 300.0) -> None:
    """Look until a condition holds, more seldom the longer it takes; after so many seconds the test fails."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"{what} took more than {seconds} s"
        time.sleep(min(0.5, 0.005 + waited / 10))
