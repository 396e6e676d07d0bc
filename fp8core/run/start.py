"""The work before the first iteration, committed as step 0: the initial policy, its first scales, its accuracy."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from fp8core import durable
from fp8core.config.derived import sft_training
from fp8core.config.model import WarmStartConfig
from fp8core.config.training import OptimiserConfig, TrainingConfig
from fp8core.data.demonstrations import (
    TokenisedDemonstration,
    chain_demonstrations,
    demonstration_batch,
    digest_of_rows,
    own_demonstrations,
)
from fp8core.data.source import in_epochs
from fp8core.errors import StoredFileError, UserError, first_line
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder
from fp8core.models.families import parameter_shapes
from fp8core.models.safetensors_files import FileTensors
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.e4m3 import GroupNotFinite
from fp8core.numerics.fingerprint import masters_digest
from fp8core.progress import tell_progress
from fp8core.rl.batch import TokenBatch
from fp8core.run.batches import read_scales, store_scales
from fp8core.run.build import build_engine, build_sft_trainer
from fp8core.run.context import RunContext, gc_freeze
from fp8core.run.draws import NO_DRAWS
from fp8core.run.execute import TaskResult, run_start_task
from fp8core.run.heldout import heldout_artifacts
from fp8core.run.measurement import measure_gap
from fp8core.run.policy import initial_trainer, push
from fp8core.run.rollouts import prompt_table
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.json_text import canonical_json, parse_model
from fp8core.store.ledger import START
from fp8core.store.manifest import library_versions
from fp8core.store.tables import STREAM
from fp8core.training.optimisers.optimiser import Optimiser
from fp8core.training.registry import trainer_of
from fp8core.training.saved_state import header_of
from fp8core.training.trainer import NotFiniteError, SftTrainer


def warm_start(run: RunContext) -> TaskResult:
    def body() -> dict[str, Ref]:
        store = run.store
        weights = run.base
        outputs = dict[str, Ref]()
        if run.config.warm_start is not None:
            outputs["weights"], weights = shared_weights(run, run.config.warm_start)
        digest = masters_digest(weights, _digest_device(run.config.training))
        first = {"version": START, "weights_digest": digest}
        if run.config.loss.reference is not None:
            outputs["reference_policy"] = store.put_json("reference_policy", first)
        return {"policy": store.put_json("policy", first), **outputs}

    return run_start_task(run, "warm_start", {"revision": run.model_revision}, body)


def _digest_device(training: TrainingConfig) -> torch.device:
    """A CPU reads billions of weights for long. The digest is the same."""
    return torch.device(trainer_of(training).device(training) if torch.cuda.is_available() else "cpu")


def build_workers(run: RunContext) -> None:
    with run.console.part("starting engine and trainer"):
        # Engines that size themselves by the free memory of a device come first, and have no use for it yet.
        torch.cuda.empty_cache()
        run.workers.engine = build_engine(run.config, run.arch, run.cluster)
        run.engine.sleep()
        run.workers.trainer = initial_trainer(run)
    gc_freeze()


def first_scales(run: RunContext) -> TaskResult:
    def body() -> dict[str, Ref]:
        problems = run.source.training(1, run.config.rollout.prompts_per_step, run.config.seed)
        prompts = prompt_table(run, problems)["tokens"].to_pylist()
        batch = TokenBatch.of_prompts(prompts)
        try:
            amax = run.trainer.statistics(batch).amax()
        except GroupNotFinite as error:
            _check_finite(run, error)
            raise
        return {"scales": store_scales(run, 0, amax)}

    return run_start_task(run, "calibrate", {}, body)


def _check_finite(run: RunContext, error: GroupNotFinite) -> None:
    for name, tensor in run.base.items():
        if not tensor.isfinite().all():
            raise UserError(f"model={run.config.model}: tensor {name} holds NaN or infinity") from error


def first_evaluation(run: RunContext, scales: Ref) -> TaskResult:
    def body() -> dict[str, Ref]:
        push(run, read_scales(run, scales))
        return heldout_artifacts(run, START)

    result = run_start_task(run, "evaluate", {"scales": scales.digest}, body)
    if result.is_reused and run.directory.ledger.step(START) is None:
        # The manifest of step 0, which is yet to be written, records what the engine holds.
        push(run, read_scales(run, scales))
    return result


def first_stream(run: RunContext) -> TaskResult:
    empty = STREAM.empty_table()
    return run_start_task(run, "stream", {}, lambda: {"stream": run.store.put_table("stream", empty)})


def first_draws(run: RunContext) -> TaskResult:
    return run_start_task(run, "draws", {}, lambda: {"draws": run.store.put_json("draws", NO_DRAWS)})


def precision_gap(run: RunContext, scales: Ref, evaluation: Ref) -> TaskResult:
    def body() -> dict[str, Ref]:
        store = run.store
        in_force = read_scales(run, scales)
        content = store.get_json(evaluation)
        if run.directory.ledger.step(START) is not None:
            # The first evaluation is over, and has not pushed.
            push(run, in_force)
        gap, judgements = measure_gap(run, in_force, content)
        artifacts = {"precision_gap": store.put_json("precision_gap", gap)}
        if judgements is not None:
            artifacts["gap_judgements"] = store.put_table("judgements", judgements)
        return artifacts

    return run_start_task(run, "precision_gap", {"scales": scales.digest, "evaluation": evaluation.digest}, body)


def shared_weights(run: RunContext, config: WarmStartConfig) -> tuple[Ref, FileTensors]:
    """The warm start of this configuration: trained once, then shared by every run of the same folder of runs."""
    own = config.demonstrations is not None
    rows = own_demonstrations(run.config, config, run.tokenizer, run.arch.max_positions) if own else None
    shelf = run.config.runs.absolute() / "warm_starts"
    store = ArtifactStore(shelf)
    entry = shelf / f"{_warm_start_key(run, rows)}.json"
    if entry.exists():
        try:
            ref = parse_model(entry.read_bytes(), Ref, entry)
            weights = store.file_tensors(ref)
            header_of(store.path(ref), parameter_shapes(run.arch))
        except (StoredFileError, OSError) as error:
            run.console.note(f"the warm start of {entry} is damaged ({first_line(error)}); it is trained again")
        else:
            run.console.note(f"warm start taken from {entry}")
            run.store.put_back(ref, store)
            return ref, weights
    # Of the size of the weights, from trainings that were killed; those that others write stay.
    durable.sweep(shelf, unchanged_seconds=3600)
    ref = _train(run, config, rows, store)
    durable.write_file(entry, ref.model_dump_json().encode())
    run.store.put_back(ref, store)
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
    def batch(step: int) -> Sequence[TokenisedDemonstration]:
        if rows is None:
            return chain_demonstrations(step, run.config, config, run.source, run.tokenizer)
        return in_epochs(rows, step * config.batch_size, config.batch_size, run.config.seed, "demonstrations")

    def progress(step: int, loss: float) -> None:
        tell_progress(step + 1, config.steps)
        if step + 1 == config.steps:
            run.console.note(f"warm start: loss {loss:.4f} after {config.steps} steps")

    trainer = build_sft_trainer(run.config, run.arch, run.base, run.cluster)
    with closing(trainer or ReferenceSftTrainer(run.arch, run.base)) as learning:
        train_on_demonstrations(learning, config, batch, progress)
        return learning.store_weights(store)


_MAX_GRAD_NORM = 1.0


def train_on_demonstrations(
    trainer: SftTrainer,
    config: WarmStartConfig,
    batch: Callable[[int], Sequence[TokenisedDemonstration]],
    progress: Callable[[int, float], None],
) -> None:
    """`progress` hears each step's index and mean cross-entropy (nats a token)."""
    for step in range(config.steps):
        try:
            loss = trainer.sft_step(demonstration_batch(batch(step)), _learning_rate(config, step))
        except NotFiniteError as error:
            raise NotFiniteError(f"warm start, step {step}: {error}") from error
        if not math.isfinite(loss):
            raise NotFiniteError(f"warm start, step {step}: the loss is {loss}")
        progress(step, loss)


def _learning_rate(config: WarmStartConfig, step: int) -> float:
    """A cosine to 0 over the run, after a warm-up of a twentieth of it."""
    warm = max(1, config.steps // 20)
    share = min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return config.learning_rate * share


class ReferenceSftTrainer:
    """AdamW on FP32 weights, through the decoder in its reference formats; satisfies `SftTrainer`."""

    def __init__(self, arch: Architecture, initial: Mapping[str, Tensor]) -> None:
        self._masters = {name: tensor.float().clone().requires_grad_(True) for name, tensor in initial.items()}
        self._decoder = Decoder(arch, reference_formats(arch.num_layers))
        self._optimiser = Optimiser(OptimiserConfig(), self._masters)

    @property
    def masters(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._masters.items()}

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        loss = self._cross_entropy(batch)
        if not math.isfinite(loss.item()):
            return loss.item()
        for master in self._masters.values():
            master.grad = None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self._masters.values()), _MAX_GRAD_NORM)
        if not math.isfinite(norm.item()):
            raise NotFiniteError(f"the gradient norm is {norm.item()}")
        self._optimiser.update({name: master.grad for name, master in self._masters.items()}, learning_rate)
        return loss.item()

    def store_weights(self, store: ArtifactStore) -> Ref:
        return store.put_tensors("weights", self.masters)

    def close(self) -> None:
        pass

    def _cross_entropy(self, batch: TokenBatch) -> Tensor:
        formats = self._decoder.formats
        tensors = stored_weights(self._masters, formats.stored_names(), formats.recipe.weights)
        weights = load_policy(self._decoder.arch, tensors, self._masters)
        total = torch.zeros(())
        tokens = 0
        for part in _by_length(batch):
            logprobs, _ = self._decoder.completion_logprobs(weights, part, temperature=1.0)
            total = total - logprobs.sum()
            tokens = tokens + logprobs.numel()
        return total / tokens


def _by_length(batch: TokenBatch) -> Iterator[TokenBatch]:
    """Two halves at most, so that little padding is computed."""
    lengths = batch.valid.sum(dim=1)
    short = lengths <= lengths.double().mean()
    for rows in (short, ~short):
        if rows.any():
            yield batch.part(rows.nonzero()[:, 0].tolist(), int(lengths[rows].max()))
