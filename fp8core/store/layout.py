"""Names of the files and folders in a run's folder. Waiting processes import this module: it imports no torch."""

from pathlib import Path
from typing import Final

LEDGER: Final = "ledger.jsonl"
DESCRIPTION: Final = "run.json"
LOCK: Final = "lock"
SUMMARY: Final = "summary.json"
ANSWERS: Final = "answers.jsonl"
"""Of judges, as long as no step that has them is committed."""

ARTIFACTS: Final = "artifacts"
MANIFESTS: Final = "manifests"
SHARDS: Final = "shards"
CHECKPOINTS: Final = "checkpoints"
FOLDERS: Final = (ARTIFACTS, MANIFESTS, SHARDS, CHECKPOINTS)

POLICY: Final = "policy"
"""Folder within a checkpoint: the policy in the layout of Hugging Face."""
REFERENCE: Final = "reference"
"""Folder within a checkpoint: a reference policy that has been mixed, as the trainer's own state."""


def manifest_place(step: int) -> str:
    return f"{MANIFESTS}/{step:05d}.json"


def checkpoint_place(step: int) -> str:
    return f"{CHECKPOINTS}/{step:05d}"


def shards_of_steps(run: Path) -> list[Path]:
    return sorted((run / SHARDS).glob("[0-9]*"))


def shards_place(step: int) -> str:
    return f"{SHARDS}/{step:05d}"
