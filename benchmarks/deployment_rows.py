"""What a deployed run left in its folder, as fields of a row."""

from pathlib import Path
from typing import Any

from benchmarks.small_rows import provenance, seconds_by_task
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.formats import rollout_formats
from fp8core.models.weights import stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.report.run_data import RunData, read_run
from fp8core.report.summary import REWARD, TMPE, series
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.evidence import read_manifest
from fp8core.store.ledger import START
from fp8core.store.run_directory import LEDGER

Row = dict[str, Any]

# Of every tensor, or of every layer and step.
_LONG = ("dtypes", "scales", "linear")


def run_facts(folder: Path) -> Row:
    """Steps, mismatch, digests, seconds, what ran and where; without a committed iteration only that there is none."""
    if not (folder / LEDGER).exists():
        return {"steps": 0}
    run = read_run(folder, folder.name)
    last = max(run.evidence.steps, default=START)
    if last == START:
        return {"steps": 0}
    return {
        "steps": last,
        "tmpe": list(series(run.history, TMPE)[1]),
        "rewards": list(series(run.history, REWARD)[1]),
        "task_seconds": seconds_by_task(run),
        **_digests(run, last),
        "ran": _executed(run, last),
        **provenance(run.evidence),
    }


def _digests(run: RunData, last: int) -> Row:
    """Of the weights that vLLM read back in each step, which `tasks/sync.py` compared with what was sent; of the
    trainer's; and whether the last checkpoint, quantised anew, is what vLLM holds."""
    store = ArtifactStore(run.evidence.folder)
    steps = [run.evidence.steps[index] for index in range(START + 1, last + 1)]
    held = [store.get_json(commit.artifacts["sync_report"])["digest"] for commit in steps]
    trained = [_manifest(run, commit.step).record.weights_digest for commit in steps]
    return {"engine_digests": held, "weights_digests": trained, "checkpoint_is_held": _is_held(run, last, held[-1])}


def _is_held(run: RunData, last: int, held: str) -> bool | None:
    """None where there is no checkpoint of the last step, or one that is narrower than what the engine holds."""
    folder, config = run.evidence.folder / "checkpoints" / f"{last:05d}" / "policy", run.evidence.config
    if config is None or config.precision.rollout.linear == "fp32" or not folder.is_dir():
        return None
    checkpoint = load_checkpoint(folder)
    formats = rollout_formats(config.precision, checkpoint.architecture.num_layers)
    tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    return policy_digest(stored_weights(tensors, formats.stored_names(), formats.scale_rule)) == held


def _executed(run: RunData, step: int) -> Row:
    """What engine, trainer and verifier said they run, but for what is said of every tensor."""
    executed = _manifest(run, step).record.executed
    return {
        name: {key: value for key, value in said.items() if key not in _LONG} if isinstance(said, dict) else said
        for name, said in executed.items()
    } | {f"{name}_linear": sorted({*said["linear"]}) for name, said in executed.items() if _has_linears(said)}


def _has_linears(said: Any) -> bool:
    return isinstance(said, dict) and isinstance(said.get("linear"), list)


def _manifest(run: RunData, step: int) -> Any:
    manifest, problems = read_manifest(run.evidence.folder, run.evidence.steps[step])
    assert manifest is not None, problems
    return manifest
