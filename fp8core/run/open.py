"""Open a run's folder and build what is alive in it. MLflow is not known here: replays and audits need none."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType

import torch
from pydantic import JsonValue

from fp8core.config.load import config_digest
from fp8core.config.loss import SHIPPED_LOSSES
from fp8core.config.run import RunConfig, public_dump
from fp8core.config.step_graph import StepGraph
from fp8core.data.source import build_source, failed_answer
from fp8core.errors import UserError
from fp8core.freed_memory import keep_freed_memory
from fp8core.report.console import Console
from fp8core.rewards.verifier import build_verifier
from fp8core.rl.user_loss import loss_source
from fp8core.run.build import BaseModel, build_base, build_environment, members_node, open_cluster, wants_gpus
from fp8core.run.context import RunContext, register, release
from fp8core.run.continuation import other_code, refuse_other_data, refuse_other_run
from fp8core.run.preflight import check_data, check_environment
from fp8core.run.refusals import check_memory, uncorrected_lag
from fp8core.store.artifacts import RolloutShards
from fp8core.store.layout import shards_of_steps
from fp8core.store.ledger import LedgerView, SegmentEntry
from fp8core.store.manifest import PACKAGES, current_code, git_state, hardware
from fp8core.store.run_directory import RunDirectory
from fp8core.training.lora import frozen_line


@contextmanager
def open_directory(config: RunConfig, name: str, *, new_code: bool = False) -> Iterator[RunDirectory]:
    """The folder of a new or an existing run, locked, with its run.json; `new_code`: of other code, as a new segment.

    Raises UserError: it is unwritable or in use, or has finished work of another configuration or code."""
    with RunDirectory.create_or_open(config.runs.absolute() / name) as directory:
        described = directory.description()
        if described is not None:
            refuse_other_run(described, directory.ledger, config, name, new_code=new_code)
        if not directory.ledger.holds_work():
            directory.write_description(public_dump(config), current_code())
        elif described is None:
            raise UserError(f"{directory.path}: run.json is missing: restore it, or start another run")
        elif new_code and other_code(described, directory.ledger.last_segment()) is not None:
            # A step is made by one code version: the groups that other code finished of it are not continued.
            for folder in shards_of_steps(directory.path):
                RolloutShards(folder).clear()
        yield directory


def _notes(config: RunConfig, base: BaseModel) -> Iterator[str]:
    if (lora := config.training.lora) is not None:
        yield frozen_line(base.arch, lora)
    if (warning := uncorrected_lag(config)) is not None:
        yield warning


@contextmanager
def open_run(
    config: RunConfig,
    graph: StepGraph,
    directory: RunDirectory,
    console: Console,
    replayed: LedgerView | None = None,
    recorded_environment: Mapping[str, JsonValue] = MappingProxyType({}),
) -> Iterator[RunContext]:
    """Everything that is alive in a run's folder, reachable for tasks (`context.live_run`) while the block lasts.

    A replay gives the ledger of its run and the description of the environment there, whose recorded answers it takes.
    Raises UserError: model, data or verifier cannot be used, or do not fit into memory."""
    source = build_source(config.data, config.evaluation)  # Before the model, which takes longer to load.
    check_memory(config, members_node(config), directory.ledger)
    with ExitStack() as parts:
        # Too few GPUs, or a node of other code: before anything is loaded.
        if (cluster := open_cluster(config)) is not None:
            parts.callback(cluster.close)
            cluster.gang.check_shared(directory.path)
        with console.part("loading the model"):
            base = build_base(config)
        verifier = parts.enter_context(closing(build_verifier(config.reward)))
        with console.part("checking the data"):
            source, left_out, remark = check_data(config, base, source, verifier)
        for note in (*_notes(config, base), *filter(None, [remark])):
            console.note(note)
        data = source.digest()
        if replayed is None:
            refuse_other_data(config, directory.ledger, data)
        if replayed is None and not directory.ledger.holds_work():
            first = next(iter(source.to_check()))
            if (failure := failed_answer(first, config, verifier)) is not None:
                console.note(failure)
        environment, described = None, recorded_environment
        if config.environment is not None and replayed is None:
            environment = parts.enter_context(closing(build_environment(config.environment)))
            if (remark := check_environment(environment, config, base, list(source.to_check()))) is not None:
                console.note(remark)
            described = environment.description
        version = current_code()
        directory.ledger.append(
            SegmentEntry(
                pid=os.getpid(),
                host=socket.gethostname(),
                code_version=version,
                started=time.time(),
                steps=config.steps,
                data=data,
                left_out=left_out,
            )
        )
        run = RunContext(
            config=config,
            config_digest=config_digest(config),
            code_version=version,
            graph=graph,
            directory=directory,
            tokenizer=base.tokenizer,
            arch=base.arch,
            source=source,
            verifier=verifier,
            model_revision=base.revision,
            machine=hardware(),
            git=git_state(PACKAGES[0]),
            console=console,
            base=base.tensors,
            cluster=cluster,
            loss_source=None if config.loss.policy in SHIPPED_LOSSES else loss_source(config.loss.policy),
            environment=environment,
            environment_description=described,
            replayed=replayed,
        )
        register(run)
        torch.set_num_threads(config.threads)
        if not wants_gpus(config):
            keep_freed_memory()
        try:
            yield run
        finally:
            release(directory.path)
