"""The seconds of a step, where a measured step had the same model shape, GPU and settings.

`docs/generate_reference.py` writes `measured_steps.json` from rows of `benchmarks/results`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.config.layers import leaves
from fp8core.config.run import RunConfig, public_dump
from fp8core.config.section import SAME_SPEED, Section
from fp8core.models.architecture import Architecture
from fp8core.resources.memory import Device

MEASURED = Path(__file__).with_name("measured_steps.json")
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("qk_norm", "qkv_bias", "tie_embeddings", "experts"),
)
_SECTIONS = (
    *("rollout.", "training.", "loss.", "logprobs.", "correction.", "precision.", "calibration.", "cluster."),
    *("replay.level", "pipeline."),
)
# Settings of these sections without an effect on the time of a step, and its sizes, which the row has too. Those of
# an engine are marked beside its section, by SAME_SPEED.
_FREE = (
    *("rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens", "rollout.max_batch"),
    *("rollout.temperature", "training.learning_rate", "training.warmup_steps", "training.beta"),
    *("training.weight_decay", "training.max_grad_norm", "loss.clip_low", "loss.clip_high", "loss.dual_clip"),
    *("loss.aggregation", "loss.length_normaliser", "loss.advantage", "precision.accept_mismatch"),
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a measured step by part, without evaluation and checkpoint. `row`: a file in `benchmarks/results`."""

    seconds: dict[str, float]
    completions: int
    length: int
    prompt: int
    row: str


def step_time(config: RunConfig, arch: Architecture, gpu: Device | None) -> StepTime | None:
    """The first measured step of the same model, GPU and settings; its sizes may be others. None: there is none."""
    if gpu is None:
        return None
    settings, shape = time_settings(config), {name: getattr(arch, name) for name in SHAPE}
    for step in json.loads(MEASURED.read_text()):
        if step["gpu"] == gpu.name and step["shape"] == shape and step["settings"] == settings:
            return StepTime(step["seconds"], step["completions"], step["length"], step["prompt"], step["row"])
    return None


def time_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that two steps must share, by dotted key; of the pipeline its mode and its tasks."""
    free = list(_FREE)
    for name, part in config.rollout:
        if isinstance(part, Section):
            # Of an engine that does not run: all.
            unused = name != config.rollout.engine
            fields = type(part).model_fields.items()
            free += [f"rollout.{name}.{key}" for key, field in fields if unused or SAME_SPEED in field.metadata]
    return {
        key: value
        for key, value in leaves(public_dump(config)).items()
        if key.startswith(_SECTIONS)
        and not key.startswith(tuple(free))
        and (not key.startswith("pipeline.") or key == "pipeline.mode" or key.endswith(".uses"))
    }
