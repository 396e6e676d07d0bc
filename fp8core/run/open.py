"""Open a run's folder and build what is alive in it. MLflow is not known here: replays and audits need none."""

import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from pydantic import JsonValue

from fp8core.alignment.bounds import EQUAL, contract_of, only_equal_bits, ratio_holds_age, unverifiable
from fp8core.config.capability import check_contract
from fp8core.config.load import config_digest, config_digest_at, may_continue, reload_config
from fp8core.config.loss import SHIPPED_LOSSES
from fp8core.config.run import RunConfig, own_code, public_dump
from fp8core.config.shipped_steps import TEACHER
from fp8core.config.step_graph import Plan, check_pipeline
from fp8core.config.steps import import_spec
from fp8core.data.prompt import Problem
from fp8core.data.source import build_source, failed_answer
from fp8core.durable import refuse_unwritable
from fp8core.environments.pool import EnvironmentPool
from fp8core.errors import StoredFileError, UserError, without_passwords
from fp8core.freed_memory import keep_freed_memory
from fp8core.kernels.compilation import KernelFolders
from fp8core.models.weights import training_formats
from fp8core.report.console import Console
from fp8core.rewards.verifier import build_verifier
from fp8core.rl.correction import CorrectionRule
from fp8core.rl.objective import Objective, named_correction, whole_batch_setting
from fp8core.rl.user_loss import loss_source
from fp8core.rollout.registry import continuation_of, engine_entry, longest_row
from fp8core.run.build import (
    BaseModel,
    build_base,
    build_environment,
    check_engine,
    check_memory,
    check_new,
    check_opened,
    members_node,
    open_cluster,
    refuse_other_data,
    wants_gpus,
)
from fp8core.run.context import RunContext, register, release
from fp8core.run.episodes import check_observation, check_openings, failed_trial, refuse_invalid, tool_calls_of, trial
from fp8core.store.artifacts import ArtifactStore, RolloutShards
from fp8core.store.layout import LEDGER, shards_of_steps
from fp8core.store.ledger import LedgerView, SegmentEntry
from fp8core.store.manifest import PACKAGES, SigningKey, current_code, git_state, hardware, read_signing_key
from fp8core.store.outputs import refuse_in_run
from fp8core.store.run_directory import RunDescription, RunDirectory, read_description, refuse_in_use
from fp8core.store.start_tasks import CARRIED_KINDS
from fp8core.store.step_manifests import read_manifest
from fp8core.training.lora import frozen_line
from fp8core.training.registry import trainer_of


def plan_of(config: RunConfig) -> Plan:
    """The checked pipeline of a configuration whose precision contract can be kept where it computes.

    Raises:
        UserError: the contract is beyond the engines, the correction names what does not exist, or as `pipeline_of`
            and `run.build.members_node`.
    """
    node = members_node(config)
    check_engine(config, node)
    return plan_on(config, node.platform)


def plan_on(config: RunConfig, platform: str) -> Plan:
    """The checked pipeline of a configuration, on a platform (`config.capability.this_platform`).

    Raises:
        UserError: the contract is beyond the platform, the correction names what does not exist, or as `pipeline_of`.
    """
    # On the CPU trainer and embedded engine compute everything, whatever else the machine has.
    where = platform if config.training.device == "cuda" else "cpu"
    check_contract(config.precision, where, corrected=config.correction.method != "none")
    Objective(config.loss, config.correction)
    return pipeline_of(config)


def pipeline_of(config: RunConfig) -> Plan:
    """The checked pipeline of a configuration, wherever it is to run.

    Raises:
        UserError: the pipeline is broken, or nothing in it provides metrics or the log-probs that the loss asks for;
            or `logprobs.source` cannot give these; or both sides might truncate distributions differently.
    """
    plan = check_pipeline(config.pipeline, CARRIED_KINDS, import_spec)
    if not any("metrics" in planned.spec.outputs.values() for planned in plan.steps):
        raise UserError("pipeline.steps: no step provides an artifact of kind metrics; add tasks.record:record")
    asked = {"reference_kl": config.loss.reference_kl, "reward_kl": config.loss.reward_kl}
    for name, weight in asked.items():
        if weight and not any("reference" in planned.inputs for planned in plan.steps):
            raise UserError(
                f"loss.{name}={weight} needs log-probs of the reference policy: insert the step "
                "tasks.reference:reference, and rewire train: {reference: reference} (as configs/careful.yaml does)"
            )
    if config.loss.distillation.weight and not any("teacher" in planned.inputs for planned in plan.steps):
        raise UserError(
            f"loss.distillation.weight={config.loss.distillation.weight} needs log-probs of the teacher: insert the "
            "step tasks.teacher:teacher, and rewire train: {teacher: teacher} (as configs/distil.yaml does)"
        )
    if config.loss.distillation.teacher is None and any(planned.uses == TEACHER for planned in plan.steps):
        raise UserError(f"step {TEACHER}: loss.distillation.teacher names no checkpoint")
    _refuse_source(config)
    refuse_truncation(config)
    _refuse_ahead(config)
    return plan


def _refuse_source(config: RunConfig) -> None:
    """Refuse old log-probs without a pass where they come too late, or where nothing promises that they are equal."""
    source, trainer = config.logprobs.source, trainer_of(config.training)
    if source == "pass":
        return
    place = f"logprobs.source={source}"
    if not trainer.scores_updates:
        raise UserError(f"{place}: the {trainer.name} trainer does not give the log-probs of an update; set it to pass")
    if source == "training" and (setting := whole_batch_setting(config.loss, config.correction)) is not None:
        raise UserError(
            f"{place}: {setting}: that needs the log-probs of the whole batch before its first backward; set it to pass"
        )
    contract, reason = contract_of(config)
    if source == "rollout" and contract not in EQUAL:
        raise UserError(f"{place}: log-probs are not promised to be equal bit for bit ({reason}); set it to training")


def refuse_truncation(config: RunConfig) -> None:
    """Refuse top-k and top-p where the trainer may leave out a token that was sampled: its log-prob would be -inf.

    GPUs are refused too: engines there draw from whole distributions, and aligned models give their log-probs.
    """
    rollout = config.rollout
    contract, reason = contract_of(config)
    if (asked := rollout.truncated_by) is not None and contract != "exact":
        raise UserError(
            f"{asked}: rollout.engine={rollout.engine} with the {trainer_of(config.training).name} trainer may leave "
            f"other tokens on each side ({contract} contract: {reason}); unset it, or take the embedded engine and the "
            "exact trainer, or the packed one on a CPU with precision.rounding_points=kernels, in equal formats"
        )


def _refuse_ahead(config: RunConfig) -> None:
    """Refuse to generate beside an update where nothing goes on from a prefix, or what older policies do not give."""
    if config.pipeline.mode == "synchronous":
        return
    place, rollout = f"pipeline.mode={config.pipeline.mode}", config.rollout
    if config.pipeline.mode == "asynchronous" and continuation_of(config) == "none":
        raise UserError(
            f"{place}: rollout.engine={rollout.engine} does not go on from what was begun; set it to embedded, or "
            "pipeline.mode to one_step_off"
        )
    if not config.pipeline.recompute_kv_cache_after_weight_update:
        _refuse_kept_cache(config)
    if not config.training.deterministic and trainer_of(config.training).device(config.training) == "cuda":
        raise UserError(
            f"{place}: training.deterministic=false: a resumed run makes older policies again, bit for bit; set it to "
            "true"
        )
    if (reason := unverifiable(config)) is not None:
        _refuse_unverified(config, reason)
    _refuse_nothing_ahead(config)
    others = {
        "rollout.stop_strings": bool(rollout.stop_strings),
        "rollout.router_replay": rollout.router_replay,
        f"rollout.{rollout.engine}.sleep": engine_entry(config).sleeps(config) and not config.pipeline.in_turn,
        "rollout.top_k": rollout.top_k is not None,
        "rollout.top_p": rollout.top_p < 1,
        f"training.trainer={config.training.trainer}": not trainer_of(config.training).scores_updates,
    }
    for setting in (setting for setting, used in others.items() if used):
        raise UserError(f"{place}: {setting} is not computed for what was begun by an older policy; unset one of both")
    _refuse_inert_correction(config)


def _refuse_unverified(config: RunConfig, reason: str) -> None:
    """Refuse bounds of equal bits where no pass gives them, and to learn from such tokens without a weight."""
    if (setting := only_equal_bits(config)) is not None:
        raise UserError(
            f"{setting}: with pipeline.mode={config.pipeline.mode} the run is unverifiable ({reason}); loosen it, "
            "or set it to none"
        )
    if uncorrected_lag(config) is not None and not config.precision.accept_mismatch:
        raise UserError(
            f"correction.method={config.correction.method}: with pipeline.mode={config.pipeline.mode} the run is "
            f"unverifiable ({reason}), and nothing weighs its tokens; set it to token_tis, or "
            "precision.accept_mismatch to true"
        )


def _refuse_nothing_ahead(config: RunConfig) -> None:
    """Refuse settings with which the prompts of later steps wait for the part beside the update, which is empty."""
    pipeline = config.pipeline
    if pipeline.max_staleness == 0 and not pipeline.in_flight_weight_updates:
        raise UserError(
            "pipeline.in_flight_weight_updates=false: with pipeline.max_staleness=0 no update finds a completion in "
            "flight; unset one of both"
        )
    if pipeline.ahead_tokens != 0:
        return
    waiting = {
        "environment": config.environment is not None,
        "pipeline.in_flight_weight_updates=false": not pipeline.in_flight_weight_updates,
        "pipeline.recompute_kv_cache_after_weight_update=false": not pipeline.recompute_kv_cache_after_weight_update,
        "pipeline.max_inflight_prompts": pipeline.max_inflight_prompts is not None and pipeline.drop_or_wait == "wait",
    }
    for setting in (setting for setting, used in waiting.items() if used):
        raise UserError(f"pipeline.ahead_tokens=0: with {setting} nothing would be generated ahead; unset one of both")


def _refuse_inert_correction(config: RunConfig) -> None:
    """Refuse to weigh old over rollout where both are the log-probs of the version that wrote the token."""
    source, mode = config.logprobs.source, config.pipeline.mode
    if source != "rollout" or not ratio_holds_age(config):
        return
    named, threshold = named_correction(config.correction), config.correction.seq_logprob_error_threshold
    correction, bypassed = config.correction, named.mode == "bypass"
    name = f"preset={correction.preset}" if correction.method == "preset" else f"method={correction.method}"
    inert = {
        f"correction.{name}": _weighs_or_rejects(named.rule) and not bypassed,
        f"correction.baseline={correction.baseline}": bypassed and correction.baseline == "kept",
        f"correction.seq_logprob_error_threshold={threshold}": threshold is not None,
    }
    for setting in (setting for setting, used in inert.items() if used):
        raise UserError(
            f"logprobs.source={source} with pipeline.mode={mode}: old log-probs are the rollout's own, of whatever "
            f"version, so {setting} changes nothing; set correction.method to none, or correction.preset to one in "
            "bypass mode, or logprobs.source to pass"
        )


def _weighs_or_rejects(rule: CorrectionRule) -> bool:
    return rule.weighting.level != "none" or rule.rejects


def uncorrected_lag(config: RunConfig) -> str | None:
    """A warning where tokens of older policies count as if the newest had written them; None where there is none."""
    pipeline, named = config.pipeline, named_correction(config.correction)
    # Its loss has no ratio, and so no clip.
    plain = "reinforce" in (config.loss.policy, named.loss)
    weighed = _weighs_or_rejects(named.rule) or (ratio_holds_age(config) and not plain)
    if pipeline.mode == "synchronous" or pipeline.max_staleness == 0 or weighed:
        return None
    return (
        f"warning: pipeline.mode={pipeline.mode} without a correction: tokens of older policies count as those of the "
        "newest, and the clip does not see their age; set correction.method to token_tis, or max_staleness to 0"
    )


def _refuse_kept_cache(config: RunConfig) -> None:
    """Refuse to keep a cache of older weights where no engine does, or where a replay is to be equal without it."""
    place, engine = "pipeline.recompute_kv_cache_after_weight_update=false", config.rollout.engine
    if not engine_entry(config).keeps_cache:
        raise UserError(f"{place}: rollout.engine={engine} computes its cache anew; set it to embedded")
    if not config.pipeline.in_flight_weight_updates:
        raise UserError(f"{place}: with pipeline.in_flight_weight_updates=false no update finds a cache; unset one")
    if config.replay.level != "tolerant":
        raise UserError(
            f"{place}: a replay and a resumed run lack that cache; replay.level={config.replay.level} promises equal "
            "digests, set it to tolerant"
        )


def refuse_conflict(config: RunConfig, *, new_code: bool = False) -> None:
    """Refuse a named run that exists and cannot be continued, before anything is started.

    Raises:
        UserError: another process has it (pid and host), or `open_directory` would refuse it (every key that differs,
            or both code versions); its folder cannot be made; or `runs` lies in a run's own folder.
    """
    refuse_in_run(f"runs {config.runs}", config.runs)
    if config.run is None:
        refuse_unwritable(config.runs.absolute())
        return
    folder = config.runs.absolute() / config.run
    refuse_unwritable(folder)
    described = read_description(folder)
    if described is not None:
        refuse_in_use(folder)
        if (folder / LEDGER).exists():
            _refuse_other(described, LedgerView.glance(folder / LEDGER), config, config.run, new_code=new_code)


def _refuse_other(
    described: RunDescription, ledger: LedgerView, config: RunConfig, name: str, *, new_code: bool
) -> None:
    """A run is continued as it was begun, but for more steps and what makes no numbers.

    A run in which nothing was finished yet, as one whose data was not found, is no run to be true to.
    """
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
        # Unset, it follows `steps`, so that a longer run would have had another past.
        over = "training.learning_rate_schedule.over_steps: "
        keep = f"; to keep it: {resume_command(config, name)} --set steps={config.steps}"
        hint = keep if len(differing) == 1 and differing[0].startswith(over) else ""
        if not all(each.startswith(("steps: ", over)) for each in differing):
            hint = "; begin another one for that: fp8-grpo run ... --set run=NAME"
        raise UserError(f"run {name} exists with another configuration: {'; '.join(differing)}{hint}")
    if not new_code:
        refuse_other_code(described, ledger.last_segment(), config, name)
    _refuse_edited(begun, config.runs.absolute() / name, ledger)


def _refuse_edited(begun: RunConfig, folder: Path, ledger: LedgerView) -> None:
    """run.json has the settings that the last step was made with: a resume follows it, and would not see an edit."""
    last = ledger.last_step()
    entry = None if last is None else ledger.step(last)
    if entry is None:
        return
    try:
        record = read_manifest(ArtifactStore(folder), folder, entry).record
    except StoredFileError:
        return  # `restore` says so, or puts it back.
    if record.code_version == current_code() and config_digest_at(begun, record.level) != record.config_digest:
        raise UserError(
            f"{folder}/run.json has other settings than step {last} was made with: undo the change, or begin "
            "another run with it: fp8-grpo run ... --set run=NAME"
        )


def resume_command(config: RunConfig, name: str) -> str:
    """The command that continues a run of this name: a name alone is looked for below ./runs."""
    default = type(config).model_fields["runs"].default
    place = name if config.runs == default else str(config.runs.absolute() / name)
    command, store = f"fp8-grpo resume {shlex.quote(place)}", config.tracking.uri
    if store is not None and store == without_passwords(store):
        # `resume` takes no store from the folder, which may be a stranger's.
        command += f" --set {shlex.quote(f'tracking.uri={store}')}"
    return f"{command} --trust" if own_code(config) else command


def refuse_other_code(described: RunDescription, last: SegmentEntry | None, config: RunConfig, name: str) -> None:
    """A run is continued by the code that last ran it, or digests mean nothing."""
    before = _other_code(described, last)
    if before is not None:
        raise UserError(
            f"run {name} was made by code version {before[:12]}, this is {current_code()[:12]}: continue it with that "
            f"code, start a new segment with this one ({resume_command(config, name)} --new-code), or start another run"
        )


def _other_code(described: RunDescription, last: SegmentEntry | None) -> str | None:
    """The code version that last ran a run, None when it is this one."""
    before = described.code_version if last is None else last.code_version
    return before if before != current_code() else None


@contextmanager
def open_directory(config: RunConfig, name: str, *, new_code: bool = False) -> Iterator[RunDirectory]:
    """The folder of a new or an existing run, locked, with its run.json.

    Args:
        config: the checked configuration.
        name: the run's name, which is that of its folder below `config.runs`.
        new_code: continue a run of other code, as a new segment.

    Raises:
        UserError: the folder is unwritable or in use, or the run has finished work of another configuration or code.
    """
    with RunDirectory.create_or_open(config.runs.absolute() / name) as directory:
        described = directory.description()
        if described is not None:
            _refuse_other(described, directory.ledger, config, name, new_code=new_code)
        if not directory.ledger.holds_work():
            directory.write_description(public_dump(config), current_code())
        elif described is None:
            raise UserError(f"{directory.path}: run.json is missing: restore it, or start another run")
        elif new_code and _other_code(described, directory.ledger.last_segment()) is not None:
            # A step is made by one code version: the groups that other code finished of it are not continued.
            for folder in shards_of_steps(directory.path):
                RolloutShards(folder).clear()
        yield directory


def signing_key(config: RunConfig, name: str) -> SigningKey | None:
    """The key that signs the manifests of a run of this name; None: nothing does. Raises UserError: it is of no use."""
    path = config.artifacts.signing_key
    if path is None:
        return None
    if path.resolve().is_relative_to((config.runs / name).resolve()):
        raise UserError(f"artifacts.signing_key {path}: it lies in the run's own folder, which others get to see")
    return read_signing_key("artifacts.signing_key", path)


def _notes(config: RunConfig, base: BaseModel) -> Iterator[str]:
    """Lines for people about the model and the settings, once a process."""
    if base.dequantised:
        yield f"model={config.model}: {base.dequantised} weights in block FP8 are read as BF16"
    if (lora := config.training.lora) is not None:
        formats = training_formats(config.precision, base.arch.num_layers).stored_names()
        yield frozen_line(base.arch, lora, formats)
    if (warning := uncorrected_lag(config)) is not None:
        yield warning


def _try_environment(
    environment: EnvironmentPool,
    config: RunConfig,
    base: BaseModel,
    problems: Sequence[Problem],
    console: Console,
    *,
    is_new: bool,
) -> None:
    """Begin an episode of each of these problems, and play one.

    Raises:
        UserError: as `check_openings`; of a new run also as `refuse_invalid` and `check_observation`.
    """
    check_openings(problems, config, base.tokenizer, longest_row(config, base.arch), environment, config.seed)
    replies = trial(problems[0], config, environment)
    if is_new:
        refuse_invalid(replies, config)
    if (failure := failed_trial(replies, config)) is not None:
        console.note(failure)
    if is_new:
        check_observation(replies, config, base.tokenizer)


@contextmanager
def open_run(
    config: RunConfig,
    plan: Plan,
    directory: RunDirectory,
    console: Console,
    key: SigningKey | None = None,
    kernels: KernelFolders | None = None,
    recorded: Mapping[str, JsonValue] | None = None,
) -> Iterator[RunContext]:
    """Everything that is alive in a run's folder, reachable for tasks (`context.live_run`) while the block lasts.

    `key` signs what is committed, and new files in `kernels` are counted; a replay has neither. `recorded` is the
    description of an environment whose recorded answers are used instead of the environment itself.

    Raises:
        UserError: the model, the data or the verifier cannot be loaded or do not fit into memory, or a row of the data
            is of no use.
    """
    source = build_source(config.data, config.evaluation)  # Before the model, which takes longer to load.
    data = source.digest()
    if read_description(directory.path) is not None:  # Without one it is a replay, which says where prompts differ.
        refuse_other_data(config, directory.ledger, data)
    check_memory(config, members_node(config), directory.ledger)
    with ExitStack() as parts:
        # Too few GPUs, or a node of other code: before anything is loaded.
        if (cluster := open_cluster(config)) is not None:
            parts.callback(cluster.close)
            cluster.gang.check_shared(directory.path)
        base = build_base(config)
        for note in _notes(config, base):
            console.note(note)
        verifier = parts.enter_context(closing(build_verifier(config.reward, config.data.columns)))
        teacher = check_opened(config, base, source, verifier)
        is_new = not directory.ledger.holds_work() and directory.description() is not None  # Without one: a replay.
        if is_new:
            check_new(config, base, source, teacher)
            if (failure := failed_answer(next(iter(source.to_check())), config, verifier)) is not None:
                console.note(failure)
        environment = None
        if config.environment is not None:
            tool_calls_of(config.environment, base.tokenizer)
            if recorded is None:
                environment = parts.enter_context(closing(build_environment(config.environment)))
                _try_environment(environment, config, base, list(source.to_check()), console, is_new=is_new)
        version, pid, host = current_code(), os.getpid(), socket.gethostname()
        directory.ledger.append(
            SegmentEntry(pid=pid, host=host, code_version=version, started=time.time(), steps=config.steps, data=data)
        )
        run = RunContext(
            config=config,
            config_digest=config_digest(config),
            code_version=version,
            plan=plan,
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
            signing_key=key,
            environment=environment,
            environment_description={**(recorded or {})} if environment is None else {**environment.description},
            kernels=kernels,
            kept_kernels=0 if kernels is None else kernels.count(),
        )
        register(run)
        torch.set_num_threads(config.threads)
        if not wants_gpus(config):
            keep_freed_memory()
        try:
            yield run
        finally:
            release(directory.path)
