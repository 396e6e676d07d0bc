"""The work before the first iteration, committed as step 0: the initial policy, its first scales, its accuracy."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8core.config.run import TrainingConfig, WarmStartConfig
from fp8core.data.chain import ChainSource, style_of
from fp8core.errors import StoredFileError, first_line
from fp8core.numerics.fingerprint import masters_digest, policy_digest
from fp8core.report.console import StyleAccuracy
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Sampling
from fp8core.run.build import (
    build_engine,
    build_sft_trainer,
    build_trainer,
    sft_settings,
)
from fp8core.run.context import RunContext, freeze_heap
from fp8core.run.execute import TaskResult, attempt, run_task
from fp8core.run.policy import covered, push, read_scales, store_scales
from fp8core.run.resume import recompute_damaged
from fp8core.run.rollouts import completion_text, heldout_accuracy, judge, prompt_groups, prompt_table
from fp8core.store import durable
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import canonical_json, parse_model
from fp8core.store.ledger import START
from fp8core.store.manifest import library_versions
from fp8core.training.registry import trainer_of
from fp8core.training.saved_state import refuse_other_shapes
from fp8core.training.warm_start import TokenisedDemonstration, warm_start_by
from fp8core.training.warm_start import warm_start as train_on_demonstrations


def warm_start(run: RunContext) -> TaskResult:
    """Policy 0: from the supervised warm start, or the checkpoint as it is."""

    def body() -> dict[str, Ref]:
        store = run.directory.store
        if run.config.warm_start is None:
            digest = masters_digest(run.base, _digest_device(run.config.training))
            return {"policy": store.put_json("policy", {"version": 0, "weights_digest": digest})}
        weights = shared_weights(run, run.config.warm_start)
        policy = {"version": 0, "weights_digest": policy_digest(weights)}
        return {"policy": store.put_json("policy", policy), "weights": store.put_tensors("weights", weights)}

    return _once(run, "warm_start", {"revision": run.model_revision}, body)


def _digest_device(training: TrainingConfig) -> torch.device:
    """Where all weights are digested: on the GPU that trains them, since a CPU reads billions of them for long."""
    return torch.device(trainer_of(training).device(training))


def build_workers(run: RunContext) -> None:
    """Build trainer and engine around policy 0."""
    # Engines that size themselves by the free memory of a device come first, and have no use for it yet.
    torch.cuda.empty_cache()
    run.engine = build_engine(run.config, run.arch, run.cluster)
    run.engine.sleep()
    run.trainer = build_trainer(run.config, run.arch, run.initial_policy(), run.cluster)
    freeze_heap()


def first_scales(run: RunContext) -> TaskResult:
    """Scales of policy 0, from a pass over the first prompts: nothing is generated before they exist."""

    def body() -> dict[str, Ref]:
        problems = run.source.training(1, run.config.rollout.prompts_per_step, run.config.seed)
        prompts = prompt_table(run, problems)["tokens"].to_pylist()
        # TokenBatch needs a completion; the last prompt token serves, so that exactly the prompts are seen.
        batch = TokenBatch.of([tokens[:-1] or tokens for tokens in prompts], [tokens[-1:] for tokens in prompts])
        histograms = run.ready_trainer().statistics(batch).histograms()
        return {"scales": store_scales(run, 0, covered(run.config, histograms))}

    return _once(run, "calibrate", {}, body)


def first_evaluation(run: RunContext, scales: Ref) -> TaskResult:
    """Held-out accuracy of policy 0 and, after a warm start, the sampled accuracy of each demonstration style."""

    def body() -> dict[str, Ref]:
        push(run, read_scales(run, scales))
        content = heldout_accuracy(run)
        if run.config.warm_start is not None:
            content["styles"] = style_accuracy(run, run.config.warm_start)
        return {"evaluation": run.directory.store.put_json("evaluation", content)}

    result = _once(run, "evaluate", {"scales": scales.digest}, body)
    if result.reused and run.directory.ledger.step(START) is None:
        # The manifest of step 0, which is yet to be written, records what the engine holds.
        push(run, read_scales(run, scales))
    return result


def _once(run: RunContext, name: str, parts: Mapping[str, Any], body: Callable[[], dict[str, Ref]]) -> TaskResult:
    """Run a task of step 0 (`run_task`), or take what is stored, and make its damaged files again."""
    result = run_task(run, START, name, parts, body)
    if result.reused:
        recompute_damaged(run, START, name, result.entry.outputs, lambda: attempt(f"step {START}, task {name}", body))
    return result


def style_accuracy(run: RunContext, config: WarmStartConfig) -> list[dict[str, Any]]:
    """Accuracy by style of one step's worth of sampled completions, with its target."""
    problems = run.source.training(START, run.config.rollout.prompts_per_step, run.config.seed)
    prompts = prompt_table(run, problems)
    sampling = Sampling(run.config.rollout.temperature, run.config.rollout.max_new_tokens, run.tokenizer.eos_ids)
    scores: dict[str, list[float]] = defaultdict(list)
    generated = run.ready_engine().generate(prompt_groups(run, START, prompts), sampling)
    completions = [done for batch in generated for done in batch]
    for done, verdict in zip(completions, judge(run, prompts, completions), strict=True):
        scores[style_of(completion_text(done, run.tokenizer))].append(verdict.score)
    targets = {"step_by_step": config.step_by_step_target, "bare": config.bare_target}
    return [
        StyleAccuracy(style, sum(values) / len(values) if (values := scores[style]) else 0.0, target)._asdict()
        for style, target in targets.items()
    ]


def shared_weights(run: RunContext, config: WarmStartConfig) -> dict[str, Tensor]:
    """The warm start of this configuration: trained once, then shared by every run of the same folder of runs.

    It does not depend on the precision contract, so runs that compare precisions start from one policy.
    """
    shelf = run.config.runs.absolute() / "warm_starts"
    store, entry = ArtifactStore(shelf), shelf / f"{_warm_start_key(run)}.json"
    if entry.exists():
        try:
            ref = parse_model(durable.read_stored(entry), Ref, entry)
            weights = store.get_tensors(ref)
            refuse_other_shapes(store.path(ref), weights, run.base)
        except (StoredFileError, OSError) as error:
            run.console.note(f"the warm start of {entry} is damaged ({first_line(error)}); it is trained again")
        else:
            run.console.note(f"warm start taken from {entry}")
            return weights
    weights = _train(run, config)
    durable.write_file(entry, store.put_tensors("weights", weights).model_dump_json().encode())
    return weights


def _warm_start_key(run: RunContext) -> str:
    sections = ("seed", "architecture", "warm_start", "data", "threads")
    settings = run.config.model_dump(mode="json", include=set(sections))
    training = sft_settings(run.config)
    if trainer_of(training).build_sft is not None:
        settings["training"] = training.model_dump(mode="json")
    parts = {"settings": settings, "code": run.code_version, "versions": library_versions()}
    return hashlib.sha256(canonical_json(parts, "warm_start")).hexdigest()


def _train(run: RunContext, config: WarmStartConfig) -> dict[str, Tensor]:
    source = run.source
    assert isinstance(source, ChainSource), "RunConfig allows a warm start for the chain task only"

    def demonstrations(step: int) -> list[TokenisedDemonstration]:
        rows = source.demonstrations(step, config.batch_size, run.config.seed, config.step_by_step_share)
        encode = run.tokenizer.encode
        return [TokenisedDemonstration(encode(row.question), encode(row.completion)) for row in rows]

    def progress(step: int, loss: float) -> None:
        run.console.warm_start(step + 1, config.steps, loss)

    if (trainer := build_sft_trainer(run.config, run.arch, run.base)) is not None:
        return warm_start_by(trainer, config, demonstrations, progress)
    return train_on_demonstrations(run.arch, run.base, config, demonstrations, progress)
