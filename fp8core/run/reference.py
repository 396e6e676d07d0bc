"""The reference policy: that of step 0, or one that follows (`loss.reference`).

One that follows is a state of the run beside the trainer's. The update of a step mixes it, so a redo mixes it again.
Checkpoints have it, and the artifact `reference_policy` of each step has its digest."""

from pathlib import Path

from fp8core.models.tokenizer import Tokenizer
from fp8core.run.context import StepContext
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.layout import POLICY, REFERENCE
from fp8core.store.ledger import START, LedgerView
from fp8core.training.saved_state import check_checkpoint
from fp8core.training.trainer import Trainer

KIND = "reference_policy"


def reference_trainer(run: StepContext, reference_policy: Ref | None) -> Trainer:
    """`reference_policy`: of the step before, where the reference follows. Built when it is first needed."""
    if run.workers.reference is None:
        run.workers.reference = run.build_reference()
    version = START if reference_policy is None else run.store.get_json(reference_policy)["version"]
    assert run.workers.reference.version == version, "the reference is not that of this step"
    return run.workers.reference


def next_reference(run: StepContext, index: int, reference_policy: Ref) -> Ref:
    """The reference after a step, whose update is over: mixed with the new policy where that is due."""
    settings = run.config.loss.reference
    assert settings is not None, "the pipeline was checked"
    if index % settings.every:
        return reference_policy
    reference = reference_trainer(run, reference_policy)
    reference.mix(run.trainer, settings.mix)
    return run.store.put_json(KIND, {"version": reference.version, "weights_digest": reference.digest()})


def save_reference(reference: Trainer | None, checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Nothing before the first mix: policy 0 is stored already."""
    if reference is not None and reference.version > START:
        (checkpoint / REFERENCE).mkdir()
        reference.save(checkpoint / REFERENCE)
        reference.save_policy(checkpoint / REFERENCE / POLICY, tokenizer)


def load_reference(run: StepContext, checkpoint: Path) -> None:
    """Raises StoredFileError."""
    if not (checkpoint / REFERENCE).is_dir():
        reset_reference(run)
        return
    if run.workers.reference is None:
        run.workers.reference = run.build_reference()
    run.workers.reference.load(checkpoint / REFERENCE)


def reset_reference(run: StepContext) -> None:
    """Back to policy 0."""
    if run.workers.reference is not None and run.workers.reference.version > START:
        run.workers.reference.close()
        run.workers.reference = None


def check_reference(ledger: LedgerView, store: ArtifactStore, step: int, checkpoint: Path) -> str | None:
    """The digest of a checkpoint's reference; None where it has none. Raises StoredFileError: it is not its step's."""
    for content in (store.get_json(ref) for ref in ledger.effective_outputs(step).values() if ref.kind == KIND):
        if content["version"] > START:
            digest: str = content["weights_digest"]
            check_checkpoint(checkpoint / REFERENCE, content["version"], digest)
            return digest
    return None
