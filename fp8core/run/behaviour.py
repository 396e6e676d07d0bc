"""The policies that wrote what a run learns from: kept for a while, to compute the log-probs of their tokens again.

A run that generates ahead learns from tokens of several versions. Where both sides promise equal bits, a token has one
log-prob, that of (version, prefix). A pass over whole sequences with the weights of that version gives it. Updates that
landed while the completion was in flight change nothing. In an unverifiable run the pass is near what was sampled.
"""

import torch
from torch import Tensor

from fp8core.rl.batch import TokenBatch, drawn_rows
from fp8core.run.context import RunContext
from fp8core.run.resume import hold_policies
from fp8core.training.trainer import ScoringTrainer


def behaviour_logprobs(run: RunContext, batch: TokenBatch, versions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every token of completions under the version that wrote it, FP32 [B, longest].

    The trainer holds the newest of these versions, or a newer one, and holds it again afterwards.

    Args:
        run: the live run.
        batch: sequences.
        versions: int64 [B, longest], -1 where there is no token.
    """
    # One that is made again may leave the run another trainer, and another copy of those before it.
    needed = sorted(set(versions[versions >= 0].tolist()))
    run.sleep_engine()
    hold_policies(run, needed)
    policies = {version: run.kept_policies[version] for version in needed}
    trainer, found = run.ready_trainer(), (torch.zeros(versions.shape), torch.zeros(versions.shape))
    assert isinstance(trainer, ScoringTrainer), "the configuration was checked"
    for version, policy in policies.items():
        rows = (versions == version).any(dim=1).nonzero()[:, 0]
        chosen = TokenBatch(batch.tokens[rows], batch.valid[rows], batch.completion[rows])
        scored = trainer.logprobs_of(
            policy.tensors, chosen, run.config.rollout.temperature, policy.scales.layers or None
        )
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
