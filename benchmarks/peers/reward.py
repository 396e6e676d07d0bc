"""The reward of the race, as each system calls it: half of all completions are right, whatever their text.

With PEER_JOURNAL set, each scored completion is a line of that file: seconds, number of the prompt, length of the text.
"""

import os
import time
from typing import Any

from benchmarks.random_reward import score as _score


def score(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """Of fp8-grpo; `reference` is the number of the prompt."""
    if path := os.environ.get("PEER_JOURNAL"):
        # One short write in append mode is never torn.
        with open(path, "a") as journal:
            journal.write(f"{time.time():.3f} {reference} {len(completion)}\n")
    return _score(prompt, completion, reference, finish)


def trl(prompts: list[str], completions: list[str], number: list[str], **_: Any) -> list[float]:
    """Of TRL: a reward for each completion of a batch."""
    return [float(score(*each, "")) for each in zip(prompts, completions, number, strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Of verl: the reward of one completion."""
    return float(score("", solution_str, ground_truth, ""))
