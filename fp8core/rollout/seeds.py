"""Seeds of single completions: a function of where they stand in the run, never of when they were drawn."""

import hashlib


def sample_seed(run_seed: int, step: int, group: int, sample: int) -> int:
    """Signed 64-bit seed of one completion."""
    text = f"rollout/{run_seed}/{step}/{group}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
