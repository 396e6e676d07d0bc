"""The kinds that the artifacts of a run have by its configuration.

The kind of a reference decides which content `verify` expects and what `gc` keeps, and no digest covers it. So the
ledger's kinds are compared with the ports of the pipeline. A step of the user's own is not imported for this. Its
artifacts have the kinds that shipped steps read them as. An artifact that no shipped step reads has the kind of its
first entry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fp8core.config.pipeline import PipelineConfig
from fp8core.config.shipped import is_shipped
from fp8core.config.steps import import_spec
from fp8core.errors import StoredFileError
from fp8core.store.artifacts import Ref
from fp8core.store.ledger import START, LedgerView, RedoEntry, TaskEntry
from fp8core.store.start_tasks import CARRIED_KINDS, START_TASKS


@dataclass(frozen=True)
class WrongKind:
    """An artifact in the ledger whose kind is not that of its port."""

    step: int
    task: str
    artifact: str
    ref: Ref
    wanted: str

    def __str__(self) -> str:
        return f"artifact {self.artifact} is of kind {self.ref.kind}, by the pipeline it is {self.wanted}"


def wrong_kinds(entries: Iterable[TaskEntry | RedoEntry], pipeline: PipelineConfig) -> Iterator[WrongKind]:
    """The artifacts of entries, in the ledger's order, that are of another kind. Raises UserError: no such step."""
    known = _kinds(pipeline)
    for entry in entries:
        for artifact, ref in entry.outputs.items():
            if entry.step == START:
                task = START_TASKS.get(entry.task)
                wanted = ref.kind if task is None else task.outputs.get(artifact, ref.kind)
            else:
                wanted = known.setdefault(artifact, ref.kind)
            if ref.kind != wanted:
                yield WrongKind(entry.step, entry.task, artifact, ref, wanted)


def refuse_wrong_kinds(ledger: LedgerView, pipeline: PipelineConfig) -> None:
    """Raises StoredFileError: an artifact of a step that the ledger names has another kind than its port."""
    entries: list[TaskEntry | RedoEntry] = []
    for step in ledger.begun():
        entries += [*ledger.tasks(step).values(), *ledger.redone(step).values()]
    for found in wrong_kinds(entries, pipeline):
        raise StoredFileError(f"ledger.jsonl: step {found.step}, task {found.task}: {found}")
    for step, finished in ledger.steps().items():
        if finished.manifest.kind != "manifest":
            raise StoredFileError(f"ledger.jsonl: step {step}: its manifest is of kind {finished.manifest.kind}")


def _kinds(pipeline: PipelineConfig) -> dict[str, str]:
    """Artifact -> kind, of all that a shipped step provides or reads and of what a step hands to the next."""
    kinds = {end: CARRIED_KINDS[start] for start, end in pipeline.carries.items() if start in CARRIED_KINDS}
    shipped = [(step, import_spec(step.uses)) for step in pipeline.steps if is_shipped(step.uses)]
    for step, spec in shipped:
        kinds |= {step.provides.get(port, port): kind for port, kind in spec.outputs.items()}
    for step, spec in shipped:
        for port, artifact in step.inputs().items():
            if port in spec.input_kinds:
                kinds.setdefault(artifact, spec.input_kinds[port])
    return kinds
