"""What a row about an engine says beside its numbers: the engine, the sources, and all runs of a rollout."""

import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8core.config.vllm import VllmConfig
from fp8core.store.versions import git_state, library_versions

ROOT = Path(__file__).parents[1]
_OF_A_RUN = ("seconds", "tokens_per_s", "step_ms", "collections", "processors")

Row = dict[str, Any]


def engine_row(described: Mapping[str, Any], settings: VllmConfig) -> Row:
    """What decides an engine's speed: what it says of itself (`vllm_hopper_cases.summary`), and what it was told."""
    flash = described["backend"]["implementation"] == "FlashAttentionImpl"
    decode_kernel = "flash_attention" if flash else "fp8_decode"
    told = {name: getattr(settings, name) for name in ("batch_invariant", "batched_tokens", "block_size")}
    found = {name: described[name] for name in ("backend", "kernels", "runner")}
    return {**told, "forward": described["model"], "decode_kernel": decode_kernel, **found}


def source_row(script: str) -> Row:
    """The commit, the versions and the command of this process."""
    command = " ".join([script, *sys.argv[1:]])
    return {"commit": git_state(ROOT)["commit"], "versions": library_versions(), "command": command}


def repeated(run: Callable[[int], Row], repeats: int) -> Iterator[Row]:
    """Call `run` with seeds from 1 on; after every call the run of median speed so far, with what all of them took."""
    runs: list[Row] = []
    for seed in range(1, repeats + 1):
        runs.append(run(seed))
        speeds = [done["tokens_per_s"] for done in runs]
        middle = runs[speeds.index(statistics.median_low(speeds))]
        every = [{name: done[name] for name in _OF_A_RUN} for done in runs]
        yield {"repeats": len(runs), "all_tokens_per_s": speeds, **middle, "runs": every}


class StoredRows:
    """The rows of a measurement, in a file as soon as they are known: whatever ends this process, they stay."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._content: Row = {**about, "rows": self._rows}
        self._write()

    def append(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        self._write()

    def append_growing(self, rows: Iterator[Row]) -> None:
        """Add one row, of which each of `rows` is a later state."""
        before = len(self._rows)
        for row in rows:
            self._rows[before:] = [row]
            self._write()

    def fail(self, error: Exception) -> None:
        """Say what ended the measurement."""
        self._content["error"] = f"{type(error).__name__}: {error}"[-2000:]
        self._content["traceback"] = "".join(traceback.format_exception(error))[-4000:]
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._content, indent=1) + "\n")
