"""The data that a run reads, as a tracking service shows it: told apart by what is in it."""

from pathlib import Path
from typing import Any

from flows.tracking.tracker import Prompts
from fp8core.config.data import DataConfig
from fp8core.config.run import RunConfig
from fp8core.data.prompt import PromptSource, problems_digest
from fp8core.data.source import SUFFIXES


def read_prompts(config: RunConfig, source: PromptSource) -> list[Prompts]:
    """The training's prompts and its held-out ones."""
    training, heldout = source.training_set(), source.heldout(config.evaluation.prompts)
    name = f"{_name(config.data)}-training"
    return [
        Prompts(name, training.digest, "training", _place(config.data), training.rows),
        evaluated_prompts(config, problems_digest(heldout), len(heldout), heldout=True),
    ]


def evaluated_prompts(config: RunConfig, digest: str, count: int, *, heldout: bool) -> Prompts:
    """Problems of an evaluation: held-out ones of the configuration, or the rows of its `data.source`."""
    file = config.evaluation.source if heldout else None
    name = f"{_name(config.data)}-{'heldout' if heldout else 'rows'}"
    return Prompts(name, digest, "evaluation", _place(config.data) if file is None else _file(file), count)


def _name(data: DataConfig) -> str:
    """`chain`; `problems` of data/problems.jsonl; `openai-gsm8k` of a hub dataset."""
    return Path(data.source).name.partition(".")[0] if _is_file(data) else data.source.strip("/").replace("/", "-")


def _place(data: DataConfig) -> dict[str, Any]:
    if data.source == "chain":
        return {"type": "generated", "generator": "fp8core.data.chain", **data.chain.model_dump()}
    if _is_file(data):
        return _file(data.source)
    hub = {"path": data.source, "config_name": data.subset, "split": data.split, "revision": data.revision}
    return {"type": "hugging_face", **hub}


def _file(path: str) -> dict[str, Any]:
    return {"type": "local", "uri": str(Path(path).absolute())}


def _is_file(data: DataConfig) -> bool:
    return data.source.endswith(SUFFIXES) or Path(data.source).is_file()
