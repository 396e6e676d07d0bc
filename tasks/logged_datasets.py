"""The prompts of a training as MLflow datasets: those it learns from, and those it is evaluated on."""

import json
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from fp8core.config.run import DataConfig, RunConfig
from fp8core.data.jsonl import SUFFIXES
from fp8core.data.prompt import PromptSource, problems_digest
from tasks.tracking import Tracker

# MLflow's columns are text: the question, and the reference that the verifier compares with.
_SCHEMA = {"mlflow_colspec": [{"name": name, "type": "string", "required": True} for name in ("question", "reference")]}
# MLflow prints the digest in every place that names the data, and allows 36 characters.
_DIGEST_DIGITS = 12


def training_prompts(config: RunConfig, source: PromptSource) -> Dataset:
    """What prompts of the iterations are drawn from."""
    training = source.training_set()
    kind, place = _place(config.data)
    rows = "generated" if training.rows is None else training.rows
    profile = {"num_rows": rows, "prompts_per_step": config.rollout.drawn_prompts}
    return _dataset(f"{_name(config.data)}-training", training.digest, kind, place, profile)


def heldout_prompts(config: RunConfig, source: PromptSource) -> Dataset:
    """What held-out accuracy is measured on."""
    problems = source.heldout(config.evaluation.prompts)
    own_file = config.evaluation.source
    kind, place = _place(config.data) if own_file is None else _file(own_file)
    digest, profile = problems_digest(problems), {"num_rows": len(problems)}
    return _dataset(f"{_name(config.data)}-heldout", digest, kind, place, profile)


def evaluated_prompts(config: RunConfig, digest: str, count: int, *, heldout: bool) -> Dataset:
    """What an evaluation asks: held-out problems of the configuration, or the rows of its `data.source`."""
    if heldout:
        source = config.evaluation.source
        kind, place = _place(config.data) if source is None else _file(source)
    else:
        kind, place = _place(config.data)
    name = f"{_name(config.data)}-{'heldout' if heldout else 'rows'}"
    return _dataset(name, digest, kind, place, {"num_rows": count})


def log_datasets(tracker: Tracker, config: RunConfig, source: PromptSource) -> None:
    """Enter both as inputs of the run; MLflow leaves what is entered already."""
    inputs = [
        DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])
        for dataset, context in (
            (training_prompts(config, source), "training"),
            (heldout_prompts(config, source), "evaluation"),
        )
    ]
    try:
        tracker.client.log_inputs(tracker.run_id, inputs)
    except MlflowException as error:
        # Two runs that enter new data at once: one violates the uniqueness of the row that the other wrote.
        if error.error_code != "BAD_REQUEST":
            raise
        tracker.client.log_inputs(tracker.run_id, inputs)


def _dataset(name: str, digest: str, kind: str, place: dict[str, Any], profile: dict[str, Any]) -> Dataset:
    return Dataset(
        name=name,
        digest=digest[:_DIGEST_DIGITS],
        source_type=kind,
        source=json.dumps(place),
        schema=json.dumps(_SCHEMA),
        profile=json.dumps(profile),
    )


def _name(data: DataConfig) -> str:
    """`chain`; `problems` of data/problems.jsonl; `openai-gsm8k` of a hub dataset."""
    if not _is_file(data):
        return data.source.strip("/").replace("/", "-")
    return Path(data.source).name.partition(".")[0]


def _place(data: DataConfig) -> tuple[str, dict[str, Any]]:
    """MLflow's type of source, and its fields."""
    if data.source == "chain":
        return "generated", {"generator": "fp8core.data.chain", **data.chain.model_dump()}
    if _is_file(data):
        return _file(data.source)
    place = {"path": data.source, "config_name": data.subset, "split": data.split, "revision": data.revision}
    return "hugging_face", place


def _file(path: str) -> tuple[str, dict[str, Any]]:
    return "local", {"uri": str(Path(path).absolute())}


def _is_file(data: DataConfig) -> bool:
    return data.source.endswith(SUFFIXES) or Path(data.source).is_file()
