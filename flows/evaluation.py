"""Subject of an evaluation: from flat parameters to a checkpoint that is ready to answer, without Prefect."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from flows.run_lookup import description_of, find_run, reload_own
from fp8core.config.data import DataConfig
from fp8core.config.load import Overrides, load_config, merged_overrides
from fp8core.config.run import RunConfig, without_adapters
from fp8core.config.section import refusal
from fp8core.data.prompt import Problem, check_prompt
from fp8core.data.references import Readable, left_out_text, readable
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.evaluation.measure import Precision, all_problems, contract_in, has_fp8
from fp8core.models.checkpoint import find_checkpoint
from fp8core.processes.variables import set_variables
from fp8core.report.console import Console
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.rollout.registry import longest_row
from fp8core.run.build import BaseModel, build_environment, check_shape, engine_environment, find_base, members_node
from fp8core.run.export import ORIGIN, read_origin, stored_policy
from fp8core.run.measurement import Questions
from fp8core.run.open import check_opening, check_stop_strings
from fp8core.run.refusals import check_engine
from fp8core.run.replay import RunSnapshot
from fp8core.store.layout import POLICY, checkpoint_place


@dataclass(frozen=True)
class EvaluationRequest:
    """The flat parameters of an evaluation; see `flows.evaluate.evaluate`, which has their bounds and meanings."""

    target: str
    step: int | None = None
    config: str | None = None
    data: str | None = None
    prompts: int | None = None
    samples: int = 1
    k: Sequence[int] | None = None
    precisions: Sequence[Precision] = ("configured",)
    seed: int = 0
    overrides: Overrides | None = None
    parts: bool = False


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A checkpoint to evaluate: the model of `config` is its folder; `home` is that too, or the run's.

    `step` is None for a folder; `weights_digest` is of the FP32 weights, if known.
    """

    config: RunConfig
    home: Path
    step: int | None
    weights_digest: str | None


def refuse(request: EvaluationRequest) -> None:
    """Check the parameters before anything is loaded.

    Raises UserError: there is no such target, step or configuration, or parameters contradict each other.
    """
    if _is_checkpoint(request.target):
        if request.step is not None:
            raise UserError(f"{request.target}: is a checkpoint, which has no steps; omit step={request.step}")
    else:
        run = RunSnapshot.read(find_run(request.target))
        run.check_step(_step(run, request.step))
    config = _config(request, Path(request.target))
    _sample_counts(request)
    precisions_by_part(request, config)


def check_readable(request: EvaluationRequest) -> None:
    """Read what is asked and who answers, but for weights: each problem has room, and a reference that can be read.

    Raises UserError: an engine, the model, the verifier, the environment or a problem cannot be used.
    """
    config = _config(request, Path(request.target))
    model = _model(request)
    for one in _in_precisions(request, config).values():
        check_engine(one, members_node(one))
        check_shape(one, model.arch)
    check_stop_strings(config, model.tokenizer)
    with closing(build_verifier(config.reward, config.source_rewards)) as verifier:
        solvable = problems(request, config, verifier).problems
    positions = longest_row(config, model.arch)
    for problem in solvable:
        check_prompt(problem, config, model.tokenizer, positions)
    if config.environment is not None:
        with closing(build_environment(config.environment)) as pool:
            check_opening(solvable, config, model.tokenizer, positions, pool, request.seed)


def _model(request: EvaluationRequest) -> BaseModel:
    """The policy without its weights: that in its folder, else the model that the run starts from."""
    if _is_checkpoint(request.target):
        checkpoint = find_checkpoint(Path(request.target))
    else:
        run = RunSnapshot.read(find_run(request.target))
        try:
            checkpoint = find_checkpoint(run.folder / checkpoint_place(_step(run, request.step)) / POLICY)
        except UserError:  # Absent or damaged: the step will be restored from the model that the run starts from.
            return find_base(reload_own(run.description, {}))
    return BaseModel(checkpoint.architecture, checkpoint.tokenizer, checkpoint, revision=None)


@contextmanager
def open_policy(request: EvaluationRequest) -> Iterator[EvaluatedPolicy]:
    """The checkpoint while the block lasts: a step without one is restored for that time.

    Raises UserError, RedoError: as `stored_policy`.
    """
    if _is_checkpoint(request.target):
        folder = Path(request.target).absolute()
        digest = read_origin(folder).weights_digest if (folder / ORIGIN).is_file() else None
        yield EvaluatedPolicy(_config(request, folder), folder, None, digest)
        return
    run = RunSnapshot.read(find_run(request.target))
    step = _step(run, request.step)
    torch.set_num_threads(1)
    with stored_policy(run, step, Console(sys.stderr, step)) as policy:
        yield EvaluatedPolicy(_config(request, policy.folder.absolute()), run.folder, step, policy.weights_digest)


def questions(request: EvaluationRequest, config: RunConfig, rows: Sequence[Problem]) -> Questions:
    """The problems, and how they are put. Raises UserError as `refuse`."""
    return Questions(
        problems=list(rows),
        samples=request.samples,
        temperature=0.0 if request.samples == 1 else config.rollout.temperature,
        seed=request.seed,
        k=_sample_counts(request),
        text_count=len(rows) if request.parts else 0,
    )


def problems(request: EvaluationRequest, config: RunConfig, verifier: Verifier) -> Readable:
    """All rows of `data`, or the held-out prompts of the configuration. Raises UserError: they cannot be read."""
    if request.data is None:
        rows = build_source(config.data, config.evaluation).heldout(config.evaluation.prompts)
    else:
        rows = all_problems(config, request.prompts)
    split_rows = readable(rows, config, verifier)
    if not split_rows.problems:
        raise UserError(f"{config.data_title}: {left_out_text(split_rows.left_out, len(rows))}; none is left")
    return split_rows


def variants(request: EvaluationRequest, config: RunConfig) -> dict[Precision, RunConfig]:
    """The configuration in each precision, with the environment that all of their engines need.

    Raises UserError: an engine is not available, or they need to be started differently.
    """
    by_precision = _in_precisions(request, config)
    environments = {}
    for name, one in by_precision.items():
        node = members_node(one)
        check_engine(one, node)
        environments[name] = engine_environment(one, node)
    first, *others = environments
    for name in others:
        if environments[name] != environments[first]:
            raise UserError(f"precisions: the engine starts differently for {first} and {name}; ask for one at a time")
    set_variables(environments[first].required, environments[first].suggested)
    return by_precision


def precisions_by_part(request: EvaluationRequest, config: RunConfig) -> dict[Precision, RunConfig]:
    """The configuration in each precision that `parts` is about: those with FP8; none where nobody asked.

    Raises UserError: no precision has FP8, or an environment would begin the texts.
    """
    if not request.parts:
        return {}
    if config.environment is not None:
        raise UserError("parts: KL is measured on prompts of the data, and environment.name begins its own; omit parts")
    by_precision = {name: one for name, one in _in_precisions(request, config).items() if has_fp8(one.precision)}
    if not by_precision:
        raise UserError(f"parts: {', '.join(request.precisions)} has no FP8; add --precision fp8")
    return by_precision


def _in_precisions(request: EvaluationRequest, config: RunConfig) -> dict[Precision, RunConfig]:
    return {
        name: config.model_copy(update={"precision": contract_in(name, config.precision)})
        for name in request.precisions
    }


def _config(request: EvaluationRequest, weights: Path) -> RunConfig:
    own: Mapping[str, Any] = {"model": str(weights), "revision": None, "architecture": None, "warm_start": None}
    if request.data is None and request.prompts is not None:
        own = {**own, "evaluation.prompts": request.prompts}
    settings = merged_overrides(request.overrides or {}, own)
    if request.config is not None:
        config = load_config(request.config, settings)
    elif _is_checkpoint(request.target):
        raise UserError(
            f"{request.target}: is a checkpoint; name the configuration to evaluate it with by --config: a shipped one "
            "or a file"
        )
    else:
        config = reload_own(description_of(find_run(request.target)), settings)
    return without_adapters(config if request.data is None else _asked_of(config, request.data))


def _asked_of(config: RunConfig, data: str) -> RunConfig:
    """The configuration with another file or dataset, of a list as one of its sources reads and checks it."""
    name, _, place = data.partition("=") if config.listed_sources else ("", "", data)
    if name not in config.sources or not place:
        names = ", ".join(config.sources)
        raise UserError(f"data={data}: the run has a list of sources ({names}); give NAME=FILE for rows as NAME has")
    settings = config.sources[name].model_dump(include=set(DataConfig.model_fields))
    try:
        narrow = DataConfig(**{**settings, "source": place})
    except ValidationError as error:
        raise refusal(error, DataConfig, settings, "data") from error
    return config.model_copy(update={"data": narrow, "reward": config.source_rewards.get(name, config.reward)})


def _sample_counts(request: EvaluationRequest) -> list[int]:
    k = sorted({1, request.samples} if request.k is None else set(request.k))
    if k[-1] > request.samples:
        raise UserError(
            f"k={k[-1]} needs as many samples of a prompt, but samples={request.samples}; give --samples {k[-1]}"
        )
    return k


def _is_checkpoint(target: str) -> bool:
    return (Path(target) / "config.json").is_file()


def _step(run: RunSnapshot, step: int | None) -> int:
    return max(run.ledger.steps(), default=0) if step is None else step
