"""The work before the first iteration, committed as step 0: the initial policy, its first scales, its accuracy.

A model from scratch begins with a supervised warm start: it learns the task's two styles before GRPO chooses between
them. A checkpoint may learn the user's own demonstrations. Every precision of a comparison starts from the same policy.
On a CPU the warm start is computed in FP32, whatever the contract. A resident trainer that takes it over is built for
formats of its own.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from fp8core import durable
from fp8core.config.derived import sft_training
from fp8core.config.run import WarmStartConfig
from fp8core.config.training import TrainingConfig
from fp8core.data.chain import style_of
from fp8core.data.demonstrations import (
    TokenisedDemonstration,
    chain_batches,
    digest_of_rows,
    own_batches,
    own_demonstrations,
)
from fp8core.errors import StoredFileError, UserError, first_line
from fp8core.models.architecture import parameter_shapes
from fp8core.models.safetensors_files import FileTensors
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fingerprint import masters_digest
from fp8core.progress import tell_progress
from fp8core.report.console import StyleAccuracy
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_engine, build_sft_trainer
from fp8core.run.context import RunContext, gc_freeze
from fp8core.run.execute import TaskResult, attempt, run_task
from fp8core.run.player import EpisodePlayer
from fp8core.run.policy import initial_trainer, push
from fp8core.run.precision_gap import measure_gap
from fp8core.run.recompute import recompute_damaged
from fp8core.run.rollouts import heldout_accuracy, heldout_episodes, prompt_groups, prompt_table
from fp8core.run.scales import read_scales, store_scales
from fp8core.run.sft import ReferenceSftTrainer, train_on_demonstrations
from fp8core.run.verdicts import ending_of, score
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import canonical_json, parse_model
from fp8core.store.ledger import START
from fp8core.store.manifest import library_versions
from fp8core.store.tables import STREAM
from fp8core.training.registry import trainer_of
from fp8core.training.saved_state import header_of


def warm_start(run: RunContext) -> TaskResult:
    """Policy 0: from the supervised warm start, or the checkpoint as it is."""

    def body() -> dict[str, Ref]:
        store, weights, outputs = run.directory.store, run.base, dict[str, Ref]()
        if run.config.warm_start is not None:
            outputs["weights"], weights = shared_weights(run, run.config.warm_start)
        digest = masters_digest(weights, _digest_device(run.config.training))
        return {"policy": store.put_json("policy", {"version": 0, "weights_digest": digest}), **outputs}

    result = _once(run, "warm_start", {"revision": run.model_revision}, body)
    if result.reused:
        _refuse_other_base(run, result.entry.outputs["policy"])
    return result


def _refuse_other_base(run: RunContext, policy: Ref) -> None:
    """Raises UserError: the model folder has other weights than policy 0, of which a reference would be made again.

    Weights of a warm start are the run's own. Ranks compare what they read themselves.
    """
    if run.config.model is None or run.config.warm_start is not None or run.cluster is not None:
        return
    found = masters_digest(run.base, _digest_device(run.config.training))
    if found != (began := run.directory.store.get_json(policy)["weights_digest"]):
        raise UserError(
            f"model={run.config.model}: its weights are others than the run began with ({found[:12]}, then "
            f"{began[:12]}); put those back, or start another run"
        )


def _digest_device(training: TrainingConfig) -> torch.device:
    """Where all weights are digested: on a GPU where this process has one, since a CPU reads billions of them for long.
    The digest is the same on both."""
    return torch.device(trainer_of(training).device(training) if torch.cuda.is_available() else "cpu")


def build_workers(run: RunContext) -> None:
    with run.console.part("starting engine and trainer"):
        # Engines that size themselves by the free memory of a device come first, and have no use for it yet.
        torch.cuda.empty_cache()
        run.engine = build_engine(run.config, run.arch, run.cluster)
        run.engine.sleep()
        run.trainer = initial_trainer(run)
    gc_freeze()


def first_scales(run: RunContext) -> TaskResult:
    """Scales of policy 0, from a pass over the first prompts: nothing is generated before they exist."""

    def body() -> dict[str, Ref]:
        problems = run.source.training(1, run.config.rollout.prompts_per_step, run.config.seed)
        prompts = prompt_table(run, problems)["tokens"].to_pylist()
        batch = TokenBatch.of_prompts(prompts)
        try:
            amax = run.ready_trainer().statistics(batch).amax()
        except GroupNotFinite as error:
            _refuse_not_finite(run, error)
            raise
        return {"scales": store_scales(run, 0, amax)}

    return _once(run, "calibrate", {}, body)


def _refuse_not_finite(run: RunContext, error: GroupNotFinite) -> None:
    """Raises UserError: a pass met what is no number because a tensor of the model's folder holds it."""
    for name, tensor in run.base.items():
        if not tensor.isfinite().all():
            raise UserError(f"model={run.config.model}: tensor {name} holds NaN or infinity") from error


def first_evaluation(run: RunContext, scales: Ref) -> TaskResult:
    """Held-out accuracy of policy 0 and, after a warm start, the sampled accuracy of each demonstration style."""

    def body() -> dict[str, Ref]:
        push(run, read_scales(run, scales))
        if run.config.environment is not None:
            return heldout_episodes(run, START)
        content, _ = heldout_accuracy(run, run.ready_engine(), run.config.evaluation.prompts)
        if run.config.warm_start is not None and run.config.warm_start.demonstrations is None:
            content["styles"] = style_accuracy(run, run.config.warm_start)
        return {"evaluation": run.directory.store.put_json("evaluation", content)}

    result = _once(run, "evaluate", {"scales": scales.digest}, body)
    if result.reused and run.directory.ledger.step(START) is None:
        # The manifest of step 0, which is yet to be written, records what the engine holds.
        push(run, read_scales(run, scales))
    return result


def first_stream(run: RunContext) -> TaskResult:
    empty = STREAM.empty_table()
    return _once(run, "stream", {}, lambda: {"stream": run.directory.store.put_table("stream", empty)})


def precision_gap(run: RunContext, scales: Ref, evaluation: Ref) -> TaskResult:
    def body() -> dict[str, Ref]:
        store = run.directory.store
        in_force, measured = read_scales(run, scales), store.get_json(evaluation)
        if run.directory.ledger.step(START) is not None:
            # The first evaluation is over, and has not pushed.
            push(run, in_force)
        return {"precision_gap": store.put_json("precision_gap", measure_gap(run, in_force, measured))}

    return _once(run, "precision_gap", {"scales": scales.digest, "evaluation": evaluation.digest}, body)


def _once(run: RunContext, name: str, parts: Mapping[str, Any], body: Callable[[], dict[str, Ref]]) -> TaskResult:
    """Run a task of step 0 (`run_task`), or take what is stored, and make its damaged files again."""
    result = run_task(run, START, name, parts, body)
    if result.reused:
        recompute_damaged(run, START, name, result.entry.outputs, lambda: attempt(f"step {START}, task {name}", body))
    return result


def style_accuracy(run: RunContext, config: WarmStartConfig) -> list[dict[str, Any]]:
    """The share of right answers by style, of one step's worth of sampled completions, with its target.

    A score may be any number; a share is what a target is given as.
    """
    problems = run.source.training(START, run.config.rollout.prompts_per_step, run.config.seed)
    prompts = prompt_table(run, problems)
    right: dict[str, list[bool]] = defaultdict(list)
    asked = prompts.to_pylist()
    player = EpisodePlayer.of(run.config, run.tokenizer, run.arch)
    played = player.play(run.ready_engine(), prompt_groups(run, START, prompts), asked, player.sampling())
    endings = [ending_of(one, run.config, run.tokenizer) for batch in played for one in batch]
    for one, (verdict, *_) in zip(endings, score(run.verifier.main, asked, endings), strict=True):
        right[style_of(one.text)].append(verdict.outcome == "right")
    targets = {"step_by_step": config.step_by_step_target, "bare": config.bare_target}
    return [
        StyleAccuracy(style, sum(found) / len(found) if (found := right[style]) else 0.0, target)._asdict()
        for style, target in targets.items()
    ]


def shared_weights(run: RunContext, config: WarmStartConfig) -> tuple[Ref, FileTensors]:
    """The warm start of this configuration: trained once, then shared by every run of the same folder of runs.

    Each run has a copy of the file of FP32 weights.

    It does not depend on the precision contract, so runs that compare precisions start from one policy.
    """
    own = config.demonstrations is not None
    rows = own_demonstrations(run.config, config, run.tokenizer, run.arch.max_positions) if own else None
    shelf = run.config.runs.absolute() / "warm_starts"
    store, entry = ArtifactStore(shelf), shelf / f"{_warm_start_key(run, rows)}.json"
    if entry.exists():
        try:
            ref = parse_model(entry.read_bytes(), Ref, entry)
            weights = store.file_tensors(ref)
            header_of(store.path(ref), parameter_shapes(run.arch))
        except (StoredFileError, OSError) as error:
            run.console.note(f"the warm start of {entry} is damaged ({first_line(error)}); it is trained again")
        else:
            run.console.note(f"warm start taken from {entry}")
            run.directory.store.put_back(ref, store)
            return ref, weights
    # Of the size of the weights, from trainings that were killed; those that others write stay.
    durable.sweep(shelf, unchanged_seconds=3600)
    ref = _train(run, config, rows, store)
    durable.write_file(entry, ref.model_dump_json().encode())
    run.directory.store.put_back(ref, store)
    return ref, store.file_tensors(ref)


def _warm_start_key(run: RunContext, rows: Sequence[TokenisedDemonstration] | None) -> str:
    sections = ("seed", "architecture", "warm_start", "data", "threads")
    settings = run.config.model_dump(mode="json", include=set(sections))
    training = sft_training(run.config)
    if trainer_of(training).build_sft is not None:
        settings["training"] = training.model_dump(mode="json")
    parts = {"settings": settings, "code": run.code_version, "versions": library_versions()}
    if rows is not None:
        parts |= {"rows": digest_of_rows(rows), "base": masters_digest(run.base, _digest_device(run.config.training))}
    return hashlib.sha256(canonical_json(parts, "warm_start")).hexdigest()


def _train(
    run: RunContext, config: WarmStartConfig, rows: Sequence[TokenisedDemonstration] | None, store: ArtifactStore
) -> Ref:
    if rows is None:
        demonstrations = chain_batches(run.config, config, run.source, run.tokenizer)
    else:
        demonstrations = own_batches(run.config, config, rows)

    def progress(step: int, loss: float) -> None:
        tell_progress(step + 1, config.steps)
        if step + 1 == config.steps:
            run.console.note(f"warm start: loss {loss:.4f} after {config.steps} steps")

    trainer = build_sft_trainer(run.config, run.arch, run.base, run.cluster)
    with closing(trainer or ReferenceSftTrainer(run.arch, run.base)) as learning:
        train_on_demonstrations(learning, config, demonstrations, progress)
        return learning.store_weights(store)
