"""Log-probs of tokens under both policies, from the newest steps of a run that still have them."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fp8core.store.artifacts import ArtifactError, Ref, decode_table, read_checked
from fp8core.store.evidence import Evidence, spans

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


def newest_tokens(evidence: Evidence, names: tuple[str, str], missing: list[str]) -> TokenSample | None:
    """The tokens of the newest steps: until 20,000 are found, and of at most 10 steps.

    Args:
        evidence: of the run.
        names: of the artifacts with the rollouts and with the log-probs.
        missing: takes a line for what cannot be read and was not removed by gc.

    Returns:
        None when no step has tokens.
    """
    found: list[TokenSample] = []
    unread: dict[str, list[int]] = defaultdict(list)
    for commit in sorted(evidence.commits, key=lambda commit: -commit.step):
        if len(found) == MOST_STEPS or sum(len(part.position) for part in found) >= ENOUGH_TOKENS:
            break
        refs = [commit.artifacts[name] for name in names if name in commit.artifacts]
        if len(refs) < len(names) or any(was_removed(evidence, ref) for ref in refs):
            continue
        try:
            rollouts, scored = (_table(evidence, ref) for ref in refs)
        except ArtifactError as error:
            unread[reason_of(error)].append(commit.step)
        else:
            found.append(_tokens(commit.step, rollouts, scored))
    missing += [f"tokens of step {spans(steps)}: {reason}" for reason, steps in unread.items()]
    if not sum(len(part.position) for part in found):
        return None
    return TokenSample(
        tuple(sorted(step for part in found for step in part.steps)),
        np.concatenate([part.rollout for part in found]),
        np.concatenate([part.training for part in found]),
        np.concatenate([part.position for part in found]),
    )


def was_removed(evidence: Evidence, ref: Ref) -> bool:
    """Whether gc removed the file of an artifact."""
    return ref.digest in evidence.tombstones and not (evidence.folder / ref.uri).exists()


def reason_of(error: ArtifactError) -> str:
    """What is wrong with an artifact, without its path."""
    return str(error).partition(": ")[2]


def _table(evidence: Evidence, ref: Ref) -> pa.Table:
    """The columns with items for each token; a run with routed experts has a column that is a hundred times larger."""
    data = read_checked(evidence.folder / ref.uri, ref.digest, ref.size)
    return decode_table(data, ["logprobs", "written"] if ref.kind == "rollouts" else ["logprobs"])


def _tokens(step: int, rollouts: pa.Table, scored: pa.Table) -> TokenSample:
    """The written tokens of one step; rows and items of both tables correspond."""
    lengths = pc.list_value_length(rollouts["logprobs"]).to_numpy()
    same = np.array_equal(lengths, pc.list_value_length(scored["logprobs"]).to_numpy())
    assert same, f"step {step}: rollouts and log-probs are not of the same completions"
    written = _items(rollouts["written"], bool)
    before = np.concatenate([[0], np.cumsum(written)])
    starts = np.cumsum(lengths) - lengths
    position = before[:-1] - np.repeat(before[starts], lengths)
    return TokenSample(
        (step,),
        _items(rollouts["logprobs"], np.float64)[written],
        _items(scored["logprobs"], np.float64)[written],
        position[written],
    )


def _items(column: pa.ChunkedArray, dtype: type) -> NDArray[np.generic]:
    """The items of all lists of a column, one after another."""
    items: NDArray[np.generic] = pc.list_flatten(column).to_numpy().astype(dtype)
    return items
