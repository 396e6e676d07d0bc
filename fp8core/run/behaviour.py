"""The policies that wrote what a run learns from: kept for a while, to compute the log-probs of their tokens again.

A run that generates ahead learns from tokens of several versions. Where both sides promise equal bits, a token has one
log-prob, that of (version, prefix). A pass over whole sequences with the weights of that version gives it. Updates that
landed while the completion was in flight change nothing. In an unverifiable run the pass is near what was sampled.
"""

from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.alignment.bounds import unverifiable
from fp8core.rl.batch import TokenBatch, drawn_rows
from fp8core.run.commit import stored_manifest
from fp8core.run.context import RunContext
from fp8core.run.execute import carried
from fp8core.run.policy import keep_policy
from fp8core.run.recompute import (
    RedoError,
    producer_of,
    rewind_from_newest_checkpoint,
    rewind_with_engine,
)
from fp8core.run.scales import read_scales
from fp8core.training.trainer import ScoringTrainer


def behaviour_logprobs(run: RunContext, batch: TokenBatch, versions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token of completions under the version that wrote it, FP32 [B, longest].

    The trainer holds the newest of these versions, or a newer one, and holds it again afterwards. `versions`: int64 [B,
    longest], -1 where there is no token.
    """
    # One that is made again may leave the run another trainer, and another copy of those before it.
    needed = sorted(set(versions[versions >= 0].tolist()))
    run.sleep_engine()
    rebuild_kept_policies(run, needed)
    policies = {version: run.kept_policies[version] for version in needed}
    trainer, found = run.ready_trainer(), (torch.zeros(versions.shape), torch.zeros(versions.shape))
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    for version, policy in policies.items():
        rows = (versions == version).any(dim=1).nonzero()[:, 0]
        chosen = TokenBatch(batch.tokens[rows], batch.valid[rows], batch.completion[rows])
        scored = trainer.logprobs_of(policy.tensors, chosen, run.config.rollout.temperature, policy.scales.layers)
        for into, part in zip(found, (scored.logprobs, scored.entropy), strict=True):
            longest = part.shape[1]
            written = versions[rows, :longest] == version
            into[rows, :longest] = torch.where(written, part, into[rows, :longest])
    return found


def verified_rows(run: RunContext, index: int, written: Tensor) -> list[int]:
    """Completions of a step that are scored again: `pipeline.verified_share` of them, drawn from the run's seed.

    `written`: bool [rows, longest], True where the policy wrote a token.
    """
    return drawn_rows(written, run.config.pipeline.verified_share, f"behaviour/{run.config.seed}/{index}")


def rebuild_kept_policies(run: RunContext, versions: Sequence[int]) -> None:
    """Keep policies that the engine held (ascending versions); those that are not kept are rebuilt by the trainer.

    It rebuilds them from checkpoints and redone updates. The trainer returns to its version, and the engine gets that.

    Raises RedoError: an update that led to one gave another policy.
    """
    missing, held = [version for version in versions if version not in run.kept_policies], run.ready_trainer().version
    if not missing:
        return
    replaced = list[int]()
    try:
        for version in missing:
            scales = carried(run, version + 1)["scales"]
            rewind_from_newest_checkpoint(run, version)
            if run.replayed is None and is_replaced(run, version):
                # The later ones follow from it: they are rebuilt too, to find which of them differ.
                replaced.append(version)
                continue
            keep_policy(run, run.ready_trainer().export(), read_scales(run, scales))
    except RedoError:
        # A tolerant run goes on. Where a process was lost, nothing is left that could go anywhere.
        rewind_from_newest_checkpoint(run, held)
        raise
    rewind_from_newest_checkpoint(run, held)
    # An update that lacks its rollouts has them generated again, by the engine with an older policy.
    rewind_with_engine(run, held)
    run.sleep_engine()
    if replaced:
        raise RedoError(
            f"policy {replaced[0]} wrote tokens of this step, and was not had again bit for bit; resume the run: its "
            "completions in flight begin anew then"
        )


def versions_in_flight(run: RunContext, index: int) -> list[int]:
    """The policies that wrote tokens of the stream that iteration `index` starts from; none in a synchronous run."""
    if "stream" not in run.graph.carries:
        return []
    return versions_of(run.directory.store.get_table(carried(run, index)["stream"]))


def versions_of(stream: pa.Table) -> list[int]:
    """The policies that wrote tokens of a stream, ascending."""
    return sorted({version for row in stream["versions"].to_pylist() for version in row})


def is_replaced(run: RunContext, version: int) -> bool:
    """True if the run has another policy of this version now than the one that wrote beside the update after it.

    In an unverifiable run it has one that is near, as is what was sampled.
    """
    if run.directory.ledger.step(version + 1) is None or unverifiable(run.config) is not None:
        return False
    writer = producer_of(run, run.graph.carries["stream"]).name
    wrote = stored_manifest(run, version + 1).record.inputs[writer]["policy"]
    return wrote.digest != carried(run, version + 1)["policy"].digest
