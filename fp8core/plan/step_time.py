"""The seconds of a step, where a measured step had the same model shape, GPU and settings.

`measured_steps.json` has the measured steps; `docs/generate_reference.py` writes it from rows of `benchmarks/results`.
Nothing is derived from a GPU's peak rates: a training unlike all rows has no estimate.

A step may differ from the row in two sizes. Training and log-probs take time in proportion to the tokens that they
score, because a pass has a fixed number of tokens. A rollout takes time in proportion to the length of completions.
More completions together take longer than the row's, and less than the row's one batch after another. So another
number of completions gives a range.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8core.config.layers import leaves
from fp8core.config.run import RunConfig, public_dump
from fp8core.config.section import SAME_SPEED, Section
from fp8core.models.architecture import Architecture
from fp8core.resources.memory import CacheRoom, Device
from fp8core.rollout.registry import longest_sequence

MEASURED = Path(__file__).with_name("measured_steps.json")
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("qk_norm", "qkv_bias", "tie_embeddings", "experts"),
)
# Farther from a row nothing is estimated.
_LENGTHS, _COMPLETIONS = 2, 3
_SECTIONS = (
    *("rollout.", "training.", "loss.", "logprobs.", "correction.", "precision.", "calibration.", "cluster."),
    *("replay.level", "pipeline."),
)
# Settings of these sections without an effect on the time of a step, and those that `step_time` scales by or checks.
# Those of an engine are marked beside its section, by SAME_SPEED.
_FREE = (
    *("rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens", "rollout.max_batch"),
    *("rollout.temperature", "training.learning_rate", "training.warmup_steps", "training.beta"),
    *("training.weight_decay", "training.max_grad_norm", "loss.clip_low", "loss.clip_high", "loss.dual_clip"),
    *("loss.aggregation", "loss.length_normaliser", "loss.advantage", "precision.accept_mismatch"),
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step without evaluation and checkpoint, if each completion has `length` tokens.

    Attributes:
        rollout: least and most; equal for as many completions as were measured.
        logprobs: 0 where the update or the engine gives them.
        train, rest: the update, and all other tasks.
        completions, length: of the step.
        prompt: tokens of a prompt, as measured.
        measured: completions and length of the measured step.
        row: its file in `benchmarks/results`.
    """

    rollout: tuple[float, float]
    logprobs: float
    train: float
    rest: float
    completions: int
    length: int
    prompt: int
    measured: tuple[int, int]
    row: str

    @property
    def total(self) -> tuple[float, float]:
        least, most = self.rollout
        others = self.logprobs + self.train + self.rest
        return least + others, most + others


def step_time(config: RunConfig, arch: Architecture, gpu: Device | None, cache: CacheRoom | None) -> StepTime | None:
    """The time of a step by the first measured one that is like it, or None.

    `cache`, the engine's, must hold the completions that the measured engine decoded together.
    """
    if gpu is None or cache is None:
        return None
    settings, shape = time_settings(config), {name: getattr(arch, name) for name in SHAPE}
    for step in json.loads(MEASURED.read_text()):
        if step["gpu"] == gpu.name and step["shape"] == shape and step["settings"] == settings:
            return _scaled(step, config, min(config.rollout.max_new_tokens, longest_sequence(config, arch)), cache)
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


def _scaled(step: Mapping[str, Any], config: RunConfig, length: int, cache: CacheRoom) -> StepTime | None:
    """None where sizes are too far from the measured ones, or fewer completions are decoded together."""
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    known, known_length, prompt = step["completions"], step["length"], step["prompt"]
    together = min(completions, known)
    by_length, by_number = length / known_length, completions / known
    if not (1 / _LENGTHS <= by_length <= _LENGTHS and 1 / _COMPLETIONS <= by_number <= _COMPLETIONS):
        return None
    if config.rollout.max_batch < together or cache.tokens < together * length:
        return None
    seconds = {name: float(value) for name, value in step["seconds"].items()}
    scored = by_number * (length + prompt) / (known_length + prompt)
    rollout = seconds["rollout"] * by_length
    return StepTime(
        rollout=(rollout * min(1.0, by_number), rollout * max(1.0, by_number)),
        logprobs=seconds["logprobs"] * scored,
        train=seconds["train"] * scored,
        rest=seconds["rest"],
        completions=completions,
        length=length,
        prompt=prompt,
        measured=(known, known_length),
        row=step["row"],
    )
