"""The tokens that a run's policy wrote, with their log-probs under both policies, as far as they can be read."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref
from fp8core.store.run_view import RunView, spans
from fp8core.store.tables import COMPLETION_KEY, keys_of

ENOUGH_TOKENS = 20_000
MOST_STEPS = 10

Values = NDArray[np.float64]


@dataclass(frozen=True)
class TokenSample:
    """Tokens that the policy wrote in some steps.

    rollout, training: log-probs (nats) of each token under the policy that sampled and the one that trains.
    position: index of the token among those of its completion.
    """

    steps: tuple[int, ...]
    rollout: Values
    training: Values
    position: NDArray[np.int64]

    @property
    def difference(self) -> Values:
        """log p - log g of each token, in nats: training minus rollout."""
        return self.training - self.rollout


def newest_tokens(view: RunView, names: tuple[str, str], missing: list[str]) -> TokenSample | None:
    """The tokens of the newest steps: until 20,000 are found, and of at most 10 steps; None when no step has tokens.

    `names` are of the artifacts with rollouts and with log-probs; `missing` takes a line for what cannot be read and
    was not removed by gc.
    """
    found: list[TokenSample] = []
    unread = Unread("tokens")
    for commit in sorted(view.commits, key=lambda commit: -commit.step):
        if len(found) == MOST_STEPS or sum(len(part.position) for part in found) >= ENOUGH_TOKENS:
            break
        refs = [commit.artifacts[name] for name in names if name in commit.artifacts]
        if len(refs) < len(names) or any(was_removed(view, ref) for ref in refs):
            continue
        try:
            rollouts, scored = (_table(view, ref) for ref in refs)
            if refs[1].kind == "behaviour":
                rollouts = _scored_rows(rollouts, scored)
            sample = _tokens(commit.step, rollouts, scored, view.folder / refs[1].uri)
        except ArtifactError as error:
            unread.add(commit.step, error, view.folder)
        else:
            found.append(sample)
    missing += unread.lines()
    if not sum(len(part.position) for part in found):
        return None
    return TokenSample(
        tuple(sorted(step for part in found for step in part.steps)),
        np.concatenate([part.rollout for part in found]),
        np.concatenate([part.training for part in found]),
        np.concatenate([part.position for part in found]),
    )


def was_removed(view: RunView, ref: Ref) -> bool:
    return ref.digest in view.deletions and not (view.folder / ref.uri).exists()


class Unread:
    """The files that could not be read of a run's steps: one line for each reason, with the first file that has it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._found: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def add(self, step: int, error: ArtifactError, folder: Path) -> None:
        place, _, reason = str(error).removeprefix(f"{folder}/").partition(": ")
        self._found[reason].append((step, place))

    def lines(self) -> list[str]:
        return [
            f"{self._what} of step {spans(step for step, _ in places)}: {reason} ({places[0][1]})"
            for reason, places in self._found.items()
        ]


def _table(view: RunView, ref: Ref) -> pa.Table:
    columns = [*COMPLETION_KEY, "logprobs", *(["written"] if ref.kind == "rollouts" else [])]
    return ArtifactStore(view.folder).get_table(ref, columns)


def _scored_rows(rollouts: pa.Table, scored: pa.Table) -> pa.Table:
    chosen = {*keys_of(scored)}
    return rollouts.take([row for row, key in enumerate(keys_of(rollouts)) if key in chosen])


def _tokens(step: int, rollouts: pa.Table, scored: pa.Table, place: Path) -> TokenSample:
    """The written tokens of one step. Raises ArtifactError: rows or items of the tables do not correspond."""
    lengths = pc.list_value_length(rollouts["logprobs"]).to_numpy()
    if not np.array_equal(lengths, pc.list_value_length(scored["logprobs"]).to_numpy()):
        raise ArtifactError(f"{place}: logprobs: not as many items in every row as the rollouts have")
    written = _items(rollouts["written"], bool)
    before = np.concatenate([[0], np.cumsum(written)])
    starts = np.cumsum(lengths) - lengths
    position = before[:-1] - np.repeat(before[starts], lengths)
    sampled, trained = (_items(table["logprobs"], np.float64)[written] for table in (rollouts, scored))
    if not (np.isfinite(sampled).all() and np.isfinite(trained).all()):
        raise ArtifactError(f"{place}: logprobs: one of a token is not finite, here or in the rollouts")
    return TokenSample((step,), sampled, trained, position[written])


def _items(column: pa.ChunkedArray, dtype: type) -> NDArray[np.generic]:
    items: NDArray[np.generic] = pc.list_flatten(column).to_numpy().astype(dtype)
    return items
