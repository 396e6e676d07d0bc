"""Open a run's folder, build what is alive in it, and refuse before that what cannot be used together."""

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType

import torch
from pydantic import JsonValue

from fp8core.config.data import data_key
from fp8core.config.load import config_digest, may_continue, reload_config
from fp8core.config.loss import SHIPPED_LOSSES
from fp8core.config.run import RunConfig, public_dump, resume_command
from fp8core.config.step_graph import StepGraph
from fp8core.data.demonstrations import own_demonstrations
from fp8core.data.prompt import Problem, PromptSource, check_length, messages_of, prompt_text
from fp8core.data.source import CheckedSource, build_source, check_problems, failed_answer
from fp8core.durable import check_writable
from fp8core.environments.chat import ObservationError, Talk
from fp8core.environments.pool import Pool
from fp8core.environments.protocol import Outcome, Turn
from fp8core.errors import InvalidReply, StoredFileError, UserError
from fp8core.freed_memory import keep_freed_memory
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.console import Console
from fp8core.rewards.answers import AnswerLog, RecordedAnswers
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.rollout.engine import sample_seed
from fp8core.rollout.episodes import task_of
from fp8core.rollout.registry import longest_prompt, longest_row
from fp8core.run import build
from fp8core.run.context import RunContext
from fp8core.run.policy import initial_trainer
from fp8core.run.refusals import check_cluster, check_memory, graph_of, uncorrected_lag
from fp8core.run.resume import rebuild_policies
from fp8core.store.artifacts import RolloutShards
from fp8core.store.layout import ANSWERS, LEDGER, shards_of_steps
from fp8core.store.ledger import START, LedgerView, SegmentEntry
from fp8core.store.manifest import PACKAGES, current_code, git_state, hardware
from fp8core.store.run_directory import RunDescription, RunDirectory, check_no_owner, read_description
from fp8core.training.lora import frozen_line
from fp8core.user_code import digest_of_code


@contextmanager
def open_directory(config: RunConfig, name: str, *, new_code: bool = False) -> Iterator[RunDirectory]:
    """Raises UserError: it is unwritable or in use, or has finished work of another configuration or code."""
    with RunDirectory.create_or_open(config.runs.absolute() / name) as directory:
        description = directory.description()
        if description is not None:
            check_run(description, directory.ledger, config, name, new_code=new_code)
        if not directory.ledger.holds_work():
            directory.write_description(public_dump(config), current_code())
        elif description is None:
            raise UserError(f"{directory.path}: run.json is missing: restore it, or start another run")
        elif new_code and other_code(description, directory.ledger.last_segment()) is not None:
            # A step is made by one code version: the groups that other code finished of it are not continued.
            for folder in shards_of_steps(directory.path):
                RolloutShards(folder).clear()
        yield directory


def _notes(config: RunConfig, base: build.BaseModel) -> Iterator[str]:
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
    """Raises UserError: model, data or verifier cannot be used, or do not fit into memory."""
    source = build_source(config.data, config.evaluation)  # Before the model, which takes longer to load.
    check_memory(config, build.members_node(config), directory.ledger)
    with ExitStack() as parts:
        # Too few GPUs, or a node of other code: before anything is loaded.
        if (cluster := build.open_cluster(config)) is not None:
            parts.callback(cluster.close)
            cluster.workers.check_shared_folder(directory.path)
        with console.part("loading the model"):
            base = build.build_base(config)
        answers = AnswerLog(directory.path / ANSWERS) if replayed is None else RecordedAnswers()
        verifier = parts.enter_context(closing(build_verifier(config.reward, config.source_rewards, answers)))
        with console.part("checking the data"):
            source, left_out, remark = check_data(config, base, source, verifier)
        for note in (*_notes(config, base), *filter(None, [remark])):
            console.note(note)
        data = source.digest()
        if replayed is None:
            check_same_data(config, directory.ledger, data)
        if replayed is None and not directory.ledger.holds_work():
            for row in {row.source: row for row in reversed(list(source.to_check()))}.values():
                if (failure := failed_answer(row, config, verifier)) is not None:
                    console.note(failure)
            answers.forget()
        environment = None
        if config.environment is not None and replayed is None:
            environment = parts.enter_context(closing(build.build_environment(config.environment)))
            rows = list(source.to_check())
            check_opening(rows, config, base.tokenizer, longest_row(config, base.arch), environment, config.seed)
        segment = SegmentEntry(
            pid=os.getpid(),
            host=socket.gethostname(),
            code_version=current_code(),
            started=time.time(),
            steps=config.steps,
            data=data,
            left_out=left_out,
        )
        directory.ledger.append(segment)
        run = RunContext(
            config=config,
            config_digest=config_digest(config),
            code_version=segment.code_version,
            graph=graph,
            directory=directory,
            store=directory.store,
            ledger=directory.ledger,
            build_reference=lambda: initial_trainer(run),
            build_teacher=lambda: build.build_teacher(config, base.tokenizer, cluster),
            rebuild_policies=lambda versions: rebuild_policies(run, versions),
            tokenizer=base.tokenizer,
            arch=base.arch,
            source=source,
            verifier=verifier,
            answers=answers,
            model_revision=base.revision,
            machine=hardware(),
            git=git_state(PACKAGES[0]),
            console=console,
            base=base.tensors,
            cluster=cluster,
            loss_source=None if config.loss.policy in SHIPPED_LOSSES else digest_of_code(config.loss.policy)[1],
            environment=environment,
            environment_description=environment.description if environment else recorded_environment,
            replayed=replayed,
        )
        torch.set_num_threads(config.threads)
        if not build.wants_gpus(config):
            keep_freed_memory()
        parts.callback(run.close)
        yield run


def check_runnable(config: RunConfig, *, new_code: bool = False) -> None:
    check_settings(config, new_code=new_code)
    check_inputs(config)


def check_settings(config: RunConfig, *, new_code: bool = False) -> None:
    assert config.run is not None, "the command or the flow names the run"
    graph_of(config)
    check_folder(config, new_code=new_code)
    node = build.members_node(config)
    check_memory(config, node, stored_ledger(config))
    check_cluster(config, node)


def check_inputs(config: RunConfig) -> None:
    source = build_source(config.data, config.evaluation)
    # With `skip` the verifier decides which rows are read.
    if (ledger := stored_ledger(config)) is not None and all(
        data.unreadable == "refuse" for data in config.sources.values()
    ):
        check_same_data(config, ledger, source.digest())
    base = build.find_base(config)
    # A run that goes on has its warm start behind it, and reads them no more.
    has_warm_start = ledger is not None and "warm_start" in ledger.tasks(START)
    if config.warm_start is not None and config.warm_start.demonstrations is not None and not has_warm_start:
        own_demonstrations(config, config.warm_start, base.tokenizer, base.arch.max_positions)
    with closing(build_verifier(config.reward, config.source_rewards)) as verifier:
        source = check_data(config, base, source, verifier).source
    if ledger is not None:
        check_same_data(config, ledger, source.digest())
    if base.checkpoint is not None:
        base.checkpoint.check_head()
    if config.environment is not None:
        with closing(build.build_environment(config.environment)) as pool:
            positions = longest_row(config, base.arch)
            check_opening(list(source.to_check()), config, base.tokenizer, positions, pool, config.seed)


def check_data(config: RunConfig, base: build.BaseModel, source: PromptSource, verifier: Verifier) -> CheckedSource:
    check_stop_strings(config, base.tokenizer)
    check_template_arguments(config, base.tokenizer)
    if config.loss.distillation.teacher is not None:
        check_teacher(config, base.arch, build.find_teacher(config, base.tokenizer).architecture)
    return check_problems(source, config, base.tokenizer, longest_row(config, base.arch), verifier)


def check_stop_strings(config: RunConfig, tokenizer: Tokenizer) -> None:
    for string in config.rollout.stop_strings:
        try:
            tokens = tokenizer.encode(string, add_special_tokens=False)
        except UserError as error:
            raise UserError(f"rollout.stop_strings: {error}") from error
        if tokenizer.decode(tokens) != tokenizer.decode(tokens, special=True):
            raise UserError(
                f"rollout.stop_strings: {string!r} has a special token, which the text of a completion leaves out; "
                "name its id as eos_token_id in the model's generation_config.json instead"
            )


def check_template_arguments(config: RunConfig, tokenizer: Tokenizer) -> None:
    for source, data in config.sources.items():
        template = tokenizer.template if data.chat else ""
        for name in data.template_arguments:
            if not re.search(rf"\b{name}\b", template):
                key = f"{data_key(source)}.template_arguments"
                raise UserError(f"{key}: {name}: the chat template of the model does not read it")


def check_teacher(config: RunConfig, arch: Architecture, teacher: Architecture) -> None:
    setting = f"loss.distillation.teacher={config.loss.distillation.teacher}"
    positions = longest_row(config, arch)
    longest = longest_prompt(config, positions) + config.rollout.max_new_tokens
    if teacher.max_positions < longest:
        raise UserError(
            f"{setting}: it has {teacher.max_positions} positions, and a prompt with its completion may have {longest} "
            "tokens; lower data.max_prompt_tokens or rollout.max_new_tokens, or take another teacher"
        )
    if teacher.vocab_size < arch.vocab_size:
        raise UserError(
            f"{setting}: its vocab_size={teacher.vocab_size} is below the model's {arch.vocab_size}, of which every "
            "token may be written; take another teacher"
        )


def check_opening(
    problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    """Raises UserError: the environment gives a source's longest problem no reply, or makes it too long to be a
    prompt."""
    for name in {row.source: None for row in problems}:
        rows = (row for row in problems if row.source == name)
        longest = max(rows, key=lambda row: len(prompt_text(row, config, tokenizer)[0].encode()))
        _check_episode(longest, config, tokenizer, max_positions, pool, seed)


def _check_episode(
    problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int, pool: Pool, seed: int
) -> None:
    assert config.environment is not None, "a pool is of an environment"
    row = {"messages": messages_of(problem, config), "reference": problem.answer, "columns": problem.columns}
    pool.begin((0, 0), task_of(row, sample_seed(seed, 0, 0, 0)))
    ((_, reply, _),) = pool.replies(wait=True)
    pool.end((0, 0))
    name = config.environment.name
    # An episode that ends at once is for its step to tell.
    if isinstance(reply, Outcome) and (invalid := InvalidReply.read(reply.detail)) is not None:
        raise UserError(f"environment.name={name}: start: {invalid}")
    if isinstance(reply, Turn):
        try:
            count = len(Talk.of(config, tokenizer).open(reply).prompt)
        except ObservationError as error:
            place = problem.place or problem.prompt_id
            raise UserError(f"{place}: environment.name={name} begins with: {error}") from error
        check_length(problem, count, f"tokens as environment.name={name} begins it", config, max_positions)


def stored_ledger(config: RunConfig) -> LedgerView | None:
    if config.run is None or not (ledger := config.runs / config.run / LEDGER).exists():
        return None
    return LedgerView.read(ledger)


def check_folder(config: RunConfig, *, new_code: bool = False) -> None:
    if config.run is None:
        check_writable(config.runs.absolute())
        return
    folder = config.runs.absolute() / config.run
    check_writable(folder)
    description = read_description(folder)
    if description is not None:
        check_no_owner(folder)
        if (folder / LEDGER).exists():
            check_run(description, LedgerView.read(folder / LEDGER), config, config.run, new_code=new_code)


def check_same_data(config: RunConfig, ledger: LedgerView, data: str | None) -> None:
    last = ledger.last_segment()
    if not ledger.holds_work() or last is None or last.data in (None, data):
        return
    sources = [f"data.source={config.data_title}"]
    if config.evaluation.source is not None:
        sources.append(f"evaluation.source={config.evaluation.source}")
    raise UserError(
        f"{', '.join(sources)}: the problems are others than the run began with ({str(data)[:12]}, then "
        f"{str(last.data)[:12]}); put those back, or start another run"
    )


def check_run(description: RunDescription, ledger: LedgerView, config: RunConfig, name: str, *, new_code: bool) -> None:
    if not ledger.holds_work():
        return
    try:
        first_config = reload_config(description.config)
    except StoredFileError as error:
        raise StoredFileError(f"{config.runs.absolute() / name}/{error}") from error
    differing = may_continue(public_dump(first_config), public_dump(config))
    if not differing and ledger.step(config.steps + 1) is not None:
        raise UserError(f"run {name} has step {config.steps + 1} already, and steps={config.steps} asks for fewer")
    if differing:
        others = [line for line in differing if not line.startswith("steps: ")]
        hint = "; begin another one for that: fp8-grpo run ... --set run=NAME" if others else ""
        raise UserError(f"run {name} exists with another configuration: {'; '.join(differing)}{hint}")
    if not new_code:
        check_code(description, ledger.last_segment(), config, name)


def check_code(description: RunDescription, last: SegmentEntry | None, config: RunConfig, name: str) -> None:
    before = other_code(description, last)
    if before is not None:
        raise UserError(
            f"run {name} was made by code version {before[:12]}, this is {current_code()[:12]}: continue it with that "
            f"code, start a new segment with this one ({resume_command(config, name)} --new-code), or start another run"
        )


def other_code(description: RunDescription, last: SegmentEntry | None) -> str | None:
    """The code version that last ran a run, None when it is this one."""
    before = description.code_version if last is None else last.code_version
    return before if before != current_code() else None
