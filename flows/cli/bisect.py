"""`fp8-grpo bisect`: find the layer or operation that makes a policy's log-probs differ from another precision's.

A run is measured on the rollouts of its last checkpoint's step, with the scales that its next step would use. A
checkpoint has neither, so a few prompts are calibrated on and completed first.
"""

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.arguments import add_force, add_output, add_overrides, at_least
from flows.environment import set_engine_variables
from flows.launch import say
from flows.termination import ExitCode
from fp8core.config.run import own_code, public_dump, without_adapters
from fp8core.errors import UserError
from fp8core.store.layout import DESCRIPTION, POLICY
from fp8core.user_files import PICTURE, json_output

if TYPE_CHECKING:
    from torch import Tensor

    from fp8core.alignment.bisect import Bisection, Task
    from fp8core.config.run import RunConfig
    from fp8core.models.architecture import Architecture
    from fp8core.models.weights import Formats, Shipped
    from fp8core.numerics.kv_scales import LayerScales
    from fp8core.rl.batch import TokenBatch
    from fp8core.run.build import BaseModel


@dataclass(frozen=True)
class Subject:
    """Subject of a bisection: a policy, its configuration, and the tokens it scores."""

    config: "RunConfig"
    arch: "Architecture"
    masters: "Mapping[str, Tensor]"
    task: "Task"


def add_command(commands: Any) -> None:
    """Declare the command on the parser's subcommands."""
    parser = commands.add_parser("bisect", help="rank layers or operations by their share of the log-prob error")
    parser.add_argument("target", metavar="RUN|MODEL", help="a run (name or folder), or the folder of a checkpoint")
    parser.add_argument(
        "--config", default="tiny", help="where a checkpoint's prompts and settings come from (default tiny)"
    )
    add_overrides(parser)
    parser.add_argument(
        "--against",
        choices=("bf16", "fp8_block", "fp32"),
        default="bf16",
        help="the precision that precision.rollout is compared with (default bf16)",
    )
    parser.add_argument(
        "--by", choices=("layer", "operation", "both"), default="layer", help="what to flip at a time (default layer)"
    )
    parser.add_argument("--prompts", type=at_least(1), default=16, metavar="N", help="how many prompts (default 16)")
    add_output(parser, "--png", PICTURE, "draw the ranking")
    add_output(parser, "--json", json_output("compared", "tokens"), "write the ranking as JSON")
    add_force(parser)
    parser.set_defaults(command=bisect_target)


def bisect_target(options: argparse.Namespace) -> int:
    """Measure, print and draw; returns the exit code, raises UserError."""
    from fp8core.alignment.bisect import Side, bisect, units_of
    from fp8core.models.weights import rollout_formats
    from fp8core.report.text import bisection_text

    subject = _subject(options)
    contract, layers = subject.config.precision, subject.arch.num_layers
    units = units_of(subject.arch, options.by)
    rollout = contract.rollout
    title = f"{options.target}: {rollout.linear}, {rollout.kv_cache} cache, against {options.against}"
    say(f"{title}; {2 * len(units) + 2} passes over {len(subject.task.sequences)} sequences")
    bisection = bisect(
        subject.arch,
        reference=Side.of(reference_side(options.against, contract.scale_rule, layers), subject.masters),
        suspect=Side.of(rollout_formats(contract, layers), subject.masters),
        task=subject.task,
        units=units,
    )
    say(bisection_text(bisection))
    _write(bisection, options, title)
    return ExitCode.DONE


def reference_side(name: str, rule: Any, num_layers: int) -> "Formats":
    """The formats of `--against`: linears and cache in one precision, whatever layers the run keeps in BF16."""
    from fp8core.config.precision import PrecisionContract, SidePrecision
    from fp8core.models.weights import reference_formats, rollout_formats

    sides = {"bf16": SidePrecision(linear="bf16", kv_cache="bf16"), "fp8_block": SidePrecision()}
    if name == "fp32":
        return reference_formats(num_layers)
    return rollout_formats(PrecisionContract(rollout=sides[name], scale_rule=rule), num_layers)


def _write(bisection: "Bisection", options: argparse.Namespace, title: str) -> None:
    from fp8core.report.drawing import draw_bisection

    if options.json is not None:
        options.json.write_json({"compared": title, **asdict(bisection)})
    if options.png is not None and bisection.units:
        draw_bisection(bisection, options.png.target, title)


def _subject(options: argparse.Namespace) -> Subject:
    from fp8core.config.load import load_config, reload_config
    from fp8core.store.run_directory import read_description

    folder = Path(options.target)
    if (folder / "config.json").is_file():
        own = [f"model={json.dumps(str(folder))}", "architecture=null", "warm_start=null"]
        config = load_config(options.config, [*own, *options.overrides])
        _prepare(config)
        return _checkpoint(config, options.prompts)
    if not (folder / DESCRIPTION).is_file():
        folder = load_config(options.config, options.overrides).runs / options.target
    described = read_description(folder)
    if described is None:
        raise UserError(f"{options.target}: neither a checkpoint (config.json) nor a run (run.json in {folder})")
    # A run is measured under its own settings, whatever its pipeline.
    pipeline = public_dump(load_config("tiny"))["pipeline"]
    config = reload_config({**described.config, "pipeline": pipeline}, options.overrides)
    for key, path in own_code(config).items():
        if key in ("loss.policy", "rollout.engine"):
            raise UserError(f"{folder}: {key}={path} is code that its run.json names, which is never imported here")
    _prepare(config)
    return _run(config, folder, options.prompts)


def _prepare(config: "RunConfig") -> None:
    """For the trainer and the engine that are built."""
    import torch

    set_engine_variables(config)
    torch.set_num_threads(config.threads)


def _run(config: "RunConfig", folder: Path, prompts: int) -> Subject:
    """The policy of a run's last checkpoint on the rollouts of its step."""
    from fp8core.alignment.bisect import Task
    from fp8core.models.checkpoint import load_checkpoint
    from fp8core.numerics.kv_scales import LayerScales
    from fp8core.run.build import build_local_trainer
    from fp8core.store.artifacts import ArtifactStore
    from fp8core.store.layout import LEDGER
    from fp8core.store.ledger import LedgerView

    ledger, store = LedgerView.read(folder / LEDGER), ArtifactStore(folder)
    kept = [entry for entry in ledger.checkpoints() if (folder / entry.uri).is_dir()]
    if not kept:
        raise UserError(f"{folder}: the run has no checkpoint yet (checkpoint.every={config.checkpoint.every})")
    last = max(kept, key=lambda entry: entry.step)
    policy = load_checkpoint(folder / last.uri / POLICY)
    refs = [ref for task in ledger.tasks(last.step).values() for ref in task.outputs.values()]
    rollouts = store.get_table(next(ref for ref in refs if ref.kind == "rollouts")).to_pylist()
    found = [store.get_json(ref) for ref in refs if ref.kind == "scales"]
    sequences = sequences_of([row for row in rollouts if row["group"] < prompts])
    with closing(build_local_trainer(_alone(config), policy.architecture, policy.tensors)) as trainer:
        # Adapters are merged in the policy already; other masters are wider than it.
        if config.training.lora is None:
            trainer.load(folder / last.uri)
        scales = next(content["layers"] for content in found if content["version"] == last.step)
        task = Task(sequences, config.rollout.temperature, [LayerScales(**layer) for layer in scales])
        return Subject(config, trainer.arch, trainer.masters, task)


def _alone(config: "RunConfig") -> "RunConfig":
    """The configuration for a whole policy in this process, whatever grid shared it, which is scored as it is."""
    sizes = {"tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "sequence_parallel": False}
    training = without_adapters(config).training
    megatron = training.megatron.model_copy(update=sizes)
    return config.model_copy(update={"training": training.model_copy(update={"megatron": megatron})})


def sequences_of(rollouts: list[dict[str, Any]]) -> "TokenBatch":
    """Rollouts as tokens; what the policy did not write is context."""
    import torch

    from fp8core.rl.batch import TokenBatch

    batch = TokenBatch.of([row["prompt_tokens"] for row in rollouts], [row["tokens"] for row in rollouts])
    written = torch.tensor([flag for row in rollouts for flag in row["written"]])
    return replace(batch, completion=batch.completion.masked_scatter(batch.completion, written))


def _checkpoint(config: "RunConfig", count: int) -> Subject:
    """A checkpoint on completions of its own, one a prompt, in the suspect's precision."""
    from fp8core.alignment.bisect import Task
    from fp8core.data.prompt import encode_prompt
    from fp8core.data.source import build_source
    from fp8core.numerics.kv_scales import covered_amax, scales_from_statistics
    from fp8core.rl.batch import TokenBatch
    from fp8core.run.build import build_base, build_local_trainer
    from fp8core.run.open import refuse_truncation

    refuse_truncation(config)
    source, base = build_source(config.data, config.evaluation), build_base(config)
    problems = source.training(0, count, config.seed)
    prompts = [encode_prompt(problem, config, base.tokenizer, base.arch.max_positions)[1] for problem in problems]
    # TokenBatch needs a completion; the last prompt token serves.
    batch = TokenBatch.of([tokens[:-1] or tokens for tokens in prompts], [tokens[-1:] for tokens in prompts])
    with closing(build_local_trainer(_alone(config), base.arch, base.tensors)) as trainer:
        amax = covered_amax(trainer.statistics(batch).histograms(), config.calibration.covered_percentile)
        scales = scales_from_statistics(amax, config.calibration.margin, config.precision.scale_rule)
        completions = _completions(config, base, trainer.export(), scales, prompts)
        sequences = TokenBatch.of(prompts, completions)
        return Subject(config, base.arch, trainer.masters, Task(sequences, config.rollout.temperature, scales))


def _completions(
    config: "RunConfig",
    base: "BaseModel",
    stored: "Shipped",
    scales: "list[LayerScales]",
    prompts: list[list[int]],
) -> list[list[int]]:
    """One sampled completion of each prompt."""
    from fp8core.rollout.engine import PolicyScales, PromptGroup, sample_seed
    from fp8core.run.build import build_engine
    from fp8core.run.player import EpisodePlayer

    groups = [
        PromptGroup(i, str(i), tuple(tokens), (0,), (sample_seed(config.seed, 0, i, 0),))
        for i, tokens in enumerate(prompts)
    ]
    sampling = EpisodePlayer.of(config, base.tokenizer, base.arch).sampling()
    with closing(build_engine(config, base.arch)) as engine:
        engine.update(stored, PolicyScales(0, tuple(scales)), 0)
        done = {row.group: row.tokens for finished in engine.generate(groups, sampling) for row in finished}
    return [done[i] for i in range(len(prompts))]
