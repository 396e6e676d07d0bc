"""Refusals of a run that exists and cannot be continued as it is configured."""

from fp8core.config.load import may_continue, reload_config
from fp8core.config.run import RunConfig, public_dump, resume_command
from fp8core.durable import refuse_unwritable
from fp8core.errors import StoredFileError, UserError
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView, SegmentEntry
from fp8core.store.manifest import current_code
from fp8core.store.run_directory import RunDescription, read_description, refuse_in_use


def stored_ledger(config: RunConfig) -> LedgerView | None:
    if config.run is None or not (ledger := config.runs / config.run / LEDGER).exists():
        return None
    return LedgerView.read(ledger)


def refuse_conflict(config: RunConfig, *, new_code: bool = False) -> None:
    """Raises UserError: a named run exists, and another process has it or it cannot be continued
    (`refuse_other_run`)."""
    if config.run is None:
        refuse_unwritable(config.runs.absolute())
        return
    folder = config.runs.absolute() / config.run
    refuse_unwritable(folder)
    described = read_description(folder)
    if described is not None:
        refuse_in_use(folder)
        if (folder / LEDGER).exists():
            refuse_other_run(described, LedgerView.read(folder / LEDGER), config, config.run, new_code=new_code)


def refuse_other_data(config: RunConfig, ledger: LedgerView, data: str | None) -> None:
    last = ledger.last_segment()
    if not ledger.holds_work() or last is None or last.data in (None, data):
        return
    sources = [f"data.source={config.data.source}"]
    if config.evaluation.source is not None:
        sources.append(f"evaluation.source={config.evaluation.source}")
    raise UserError(
        f"{', '.join(sources)}: the problems are others than the run began with ({str(data)[:12]}, then "
        f"{str(last.data)[:12]}); put those back, or start another run"
    )


def refuse_other_run(
    described: RunDescription, ledger: LedgerView, config: RunConfig, name: str, *, new_code: bool
) -> None:
    """A run is continued as it was begun, but for more steps and what makes no numbers."""
    if not ledger.holds_work():
        return
    try:
        begun = reload_config(described.config)
    except StoredFileError as error:
        raise StoredFileError(f"{config.runs.absolute() / name}/{error}") from error
    differing = may_continue(public_dump(begun), public_dump(config))
    if not differing and ledger.step(config.steps + 1) is not None:
        raise UserError(f"run {name} has step {config.steps + 1} already, and steps={config.steps} asks for fewer")
    if differing:
        others = [line for line in differing if not line.startswith("steps: ")]
        hint = "; begin another one for that: fp8-grpo run ... --set run=NAME" if others else ""
        raise UserError(f"run {name} exists with another configuration: {'; '.join(differing)}{hint}")
    if not new_code:
        refuse_other_code(described, ledger.last_segment(), config, name)


def refuse_other_code(described: RunDescription, last: SegmentEntry | None, config: RunConfig, name: str) -> None:
    before = other_code(described, last)
    if before is not None:
        raise UserError(
            f"run {name} was made by code version {before[:12]}, this is {current_code()[:12]}: continue it with that "
            f"code, start a new segment with this one ({resume_command(config, name)} --new-code), or start another run"
        )


def other_code(described: RunDescription, last: SegmentEntry | None) -> str | None:
    """The code version that last ran a run, None when it is this one."""
    before = described.code_version if last is None else last.code_version
    return before if before != current_code() else None
