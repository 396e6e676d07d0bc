"""What other processes import."""

from typing import Any


def change_a_weight(part: Any) -> None:
    """Let the trainer of one rank hold another policy."""
    part._trainer.masters["model.norm.weight"].data[0] += 1.0
