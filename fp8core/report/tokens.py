"""The tokens that a run's policy wrote, with their log-probs under both policies, as far as they can be read."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.run_view import RunView
from fp8core.store.tables import COMPLETION_KEY, keys_of

ENOUGH_TOKENS = 20_000
MOST_STEPS = 10

Values = NDArray[np.float64]


class TokenSample(NamedTuple):
    """Written tokens of some steps: the log-prob (nats) under the training policy minus that under the rollout's."""

    steps: tuple[int, ...]
    difference: Values


def newest_tokens(view: RunView, names: tuple[str, str], missing: list[str]) -> TokenSample | None:
    """The tokens of the newest steps; None when no step has any.

    `names` are of the artifacts with rollouts and with log-probs. `missing` takes a line for each step that cannot be
    read and that gc did not remove.
    """
    parts: list[TokenSample] = []
    for commit in sorted(view.commits, key=lambda commit: -commit.step):
        if len(parts) == MOST_STEPS or sum(len(part.difference) for part in parts) >= ENOUGH_TOKENS:
            break
        refs = [commit.artifacts[name] for name in names if name in commit.artifacts]
        if len(refs) < len(names) or any(was_removed(view, ref) for ref in refs):
            continue
        try:
            parts.append(_tokens(commit.step, refs[0], refs[1], ArtifactStore(view.folder)))
        except ArtifactError as error:
            missing.append(unread("tokens", commit.step, error, view.folder))
    if not sum(len(part.difference) for part in parts):
        return None
    steps = sorted(step for part in parts for step in part.steps)
    return TokenSample(tuple(steps), np.concatenate([part.difference for part in parts]))


def was_removed(view: RunView, ref: Ref) -> bool:
    return ref.digest in view.removed_digests and not (view.folder / ref.uri).exists()


def unread(what: str, step: int, error: ArtifactError, folder: Path) -> str:
    """A line about a file of a step that cannot be read, with its place in the run's folder."""
    place, _, reason = str(error).removeprefix(f"{folder}/").partition(": ")
    return f"{what} of step {step}: {reason} ({place})"


def _tokens(step: int, rollouts_ref: Ref, scored_ref: Ref, store: ArtifactStore) -> TokenSample:
    """The written tokens of one step. Raises ArtifactError: a table cannot be read, or they do not correspond."""
    rollouts = store.get_table(rollouts_ref, [*COMPLETION_KEY, "logprobs", "written"])
    scored = store.get_table(scored_ref, [*COMPLETION_KEY, "logprobs"])
    if scored_ref.kind == "behaviour":
        compared = {*keys_of(scored)}
        rollouts = rollouts.take([row for row, key in enumerate(keys_of(rollouts)) if key in compared])
    lengths = pc.list_value_length(rollouts["logprobs"]).to_numpy()
    if not np.array_equal(lengths, pc.list_value_length(scored["logprobs"]).to_numpy()):
        raise ArtifactError(f"{store.path(scored_ref)}: logprobs: not as many items in every row as the rollouts have")
    written = _items(rollouts["written"], bool)
    sampled, trained = (_items(table["logprobs"], np.float64)[written] for table in (rollouts, scored))
    if not (np.isfinite(sampled).all() and np.isfinite(trained).all()):
        raise ArtifactError(f"{store.path(scored_ref)}: logprobs: one of a token is not finite, here or in rollouts")
    return TokenSample((step,), trained - sampled)


def _items(column: pa.ChunkedArray, dtype: type) -> NDArray[np.generic]:
    items: NDArray[np.generic] = pc.list_flatten(column).to_numpy().astype(dtype)
    return items
