"""Checkpoints as MLflow LoggedModels, so that they are found by the alignment and accuracy of their step."""

from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric

from fp8core.config.run import RunConfig
from fp8core.report.summary import HELDOUT, REWARD
from fp8core.store.ledger import CheckpointEntry
from fp8core.workers.live import LiveRun
from tasks.commit import step_metrics
from tasks.logged_datasets import heldout_prompts, training_prompts
from tasks.repair import committed_step
from tasks.tracking import TRAINING, Tracker

MODEL_TYPE = "policy"
# MLflow lists a model's metrics among those of its run, too: all forty of alignment would bury the run's own.
_ALIGNMENT = (
    "token_mult_prob_error",
    "tokens_differing",
    "kl",
    "k3_kl",
    "js_divergence",
    "chi2_token",
    "ess",
    "logprob_abs_diff",
)
_MEASURED = {
    **{name: f"alignment/{name}" for name in _ALIGNMENT},
    "reward_mean": REWARD,
    "heldout_accuracy": HELDOUT,
}


def publish_checkpoint(run: LiveRun, tracker: Tracker, entry: CheckpointEntry) -> None:
    """A checkpoint as a READY model with the metrics of its step; a second call changes nothing.

    What a kill left PENDING is taken up again. The files stay where they are: tag `checkpoint` names the folder that
    `transformers` loads.
    """
    model = _find(run, tracker, entry) or _create(run, tracker, entry)
    linked = tracker.client.get_run(tracker.run_id).outputs.model_outputs
    if model.model_id not in {output.model_id for output in linked}:
        tracker.client.log_outputs(tracker.run_id, [LoggedModelOutput(model.model_id, entry.step)])
    tracker.log_metrics(_metric_rows(run, model, entry.step))
    if model.status != LoggedModelStatus.READY:
        tracker.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def model_name(run: LiveRun, step: int) -> str:
    """Run and step; MLflow allows no dot in a model's name."""
    return f"{run.directory.path.name}-{step:05d}".replace(".", "-")


def model_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a model, by plain name, from those of its step; what the step did not measure is absent."""
    return {name: metrics[key] for name, key in _MEASURED.items() if key in metrics}


def _find(run: LiveRun, tracker: Tracker, entry: CheckpointEntry) -> LoggedModel | None:
    own = f"source_run_id = '{tracker.run_id}' AND name = '{model_name(run, entry.step)}'"
    found = tracker.client.search_logged_models([tracker.experiment_id], own, max_results=1)
    return found[0] if found else None


def _create(run: LiveRun, tracker: Tracker, entry: CheckpointEntry) -> LoggedModel:
    description = run.directory.description()
    assert description is not None, "an open run has its run.json"
    tags = {
        TRAINING: description.id,
        "run": run.directory.path.name,
        "step": str(entry.step),
        "weights_digest": entry.weights_digest,
        "checkpoint": str(run.directory.path / entry.uri / "policy"),
        "code_version": run.code_version,
    }
    return tracker.client.create_logged_model(
        tracker.experiment_id,
        name=model_name(run, entry.step),
        source_run_id=tracker.run_id,
        tags=tags,
        params=_params(run.config, entry.step),
        model_type=MODEL_TYPE,
    )


def _params(config: RunConfig, step: int) -> dict[str, str]:
    contract = config.precision
    return {
        "config": config.name,
        "seed": str(config.seed),
        "step": str(step),
        "rollout.linear": contract.rollout.linear,
        "rollout.kv_cache": contract.rollout.kv_cache,
        "training.linear": contract.training.linear,
        "training.kv_cache": contract.training.kv_cache,
        "scale_rule": contract.scale_rule,
    }


def _metric_rows(run: LiveRun, model: LoggedModel, step: int) -> list[Metric]:
    """The step's metrics as rows of the model, each with the data it was measured on."""
    training, heldout = training_prompts(run.config, run.source), heldout_prompts(run.config, run.source)
    committed = committed_step(run, step).committed_ms
    return [
        Metric(
            key,
            value,
            committed,
            step,
            model_id=model.model_id,
            dataset_name=dataset.name,
            dataset_digest=dataset.digest,
        )
        for key, value in model_metrics(step_metrics(run, step)).items()
        for dataset in [heldout if key == "heldout_accuracy" else training]
    ]
