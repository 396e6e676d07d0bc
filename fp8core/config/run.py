"""One training, declared: every field has a type, bounds and a description."""

import math
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from fp8core.config.cluster import ClusterConfig
from fp8core.config.data import Data, DataConfig, SourceConfig, data_key
from fp8core.config.engines import SglangConfig, SpeculationConfig, VllmConfig
from fp8core.config.environment import EnvironmentConfig
from fp8core.config.loss import SHIPPED_LOSSES, LogprobsConfig, LossConfig
from fp8core.config.model import ArchitectureConfig, WarmStartConfig
from fp8core.config.parity import ParityConfig
from fp8core.config.pipeline import PipelineConfig
from fp8core.config.precision import AlignmentConfig, PrecisionContract
from fp8core.config.reward import PLACEHOLDER, JudgeOptions, NamedVerifier, RewardConfig
from fp8core.config.section import Section, UserPath, UserSource, choice_of
from fp8core.config.shipped import ENGINES, OPTIMISERS, SHIPPED_ENVIRONMENTS, SHIPPED_VERIFIERS, TRACKERS, is_shipped
from fp8core.config.steps import Feature
from fp8core.config.tracking import TrackingConfig
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.errors import without_passwords
from fp8core.numerics.truncation import Truncation

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Of a run, which is that of its folder too."""


class RefillConfig(Section):
    """Dynamic sampling: others are generated in place of groups without a signal."""

    max_batches: int = Field(
        10, ge=2, le=1000, description="Batches of a step, the first one too; then it goes on with what it has."
    )


class RolloutConfig(Section):
    engine: Annotated[str, choice_of(ENGINES, "ENGINE")] = Field(
        "embedded", description="embedded (exact, on the CPU), vllm, sglang, or your own: `module:ENGINE`."
    )
    prompts_per_step: int = Field(32, ge=1, le=65536, description="Prompts that a step learns from.")
    oversample: float = Field(1.0, ge=1, le=16, description="Draw this many times the prompts at first.")
    refill: RefillConfig | None = Field(None, description="Replace groups without a signal; null: they stay.")
    retire_after: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Groups in a row, all right, after which a prompt is drawn a quarter as often; null: never.",
    )
    group_size: int = Field(8, ge=1, le=4096, description="Completions of one prompt: the group of GRPO.")
    max_new_tokens: int = Field(16, ge=1, le=1 << 20, description="Longest completion, in tokens.")
    temperature: float = Field(1.0, ge=1e-6, le=10, description="Of sampling; logits are divided by it.")
    top_k: int | None = Field(
        None, ge=1, le=1 << 24, description="Sample from the k likeliest tokens, and ties with the last; null: all."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens that have this probability together; 1: all."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Sample from tokens that have this share of the largest probability; 0: all."
    )
    max_batch: int = Field(256, ge=1, le=65536, description="Sequences that one engine decodes together.")
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=16, description="Texts; a completion ends with the token that completes one."
    )
    router_replay: bool = Field(False, description="Train with the experts that the rollout chose.")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig, description="Several tokens a forward.")
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="Of engine=vllm.")
    sglang: SglangConfig = Field(default_factory=SglangConfig, description="Of engine=sglang.")

    @property
    def truncation(self) -> Truncation | None:
        cut = Truncation(self.top_k, self.top_p, self.min_p)
        return None if cut == Truncation() else cut

    @property
    def drawn_prompts(self) -> int:
        return math.ceil(self.prompts_per_step * self.oversample)

    @property
    def most_prompts(self) -> int:
        """Of a step, with those in place of others."""
        return self.drawn_prompts * (1 if self.refill is None else self.refill.max_batches)


class CalibrationConfig(Section):
    """Scales of Q, K and V for the FP8 cache and attention."""

    source: Literal["logprob_pass", "fresh_pass"] = Field(
        "logprob_pass", description="Statistics of the pass for old log-probs (an update late), or of a new pass."
    )
    margin: float = Field(2.0, ge=1, le=64, description="Headroom: the scale covers the largest magnitude times this.")
    average: float = Field(0.5, ge=0, lt=1, description="Weight of previous steps in the moving average.")


class EvaluationConfig(Section):
    """Greedy accuracy on prompts that training never sees, generated by the rollout engine."""

    every: int = Field(5, ge=1, le=1_000_000, description="Steps between evaluations; the last step always is one.")
    prompts: int = Field(256, ge=1, le=1_000_000, description="Held-out prompts of an evaluation.")
    source: UserSource | None = Field(
        None, min_length=1, description="File of held-out rows; null holds out one prompt in eight."
    )
    precision_gap: int = Field(32, ge=0, le=1_000_000, description="Prompts that step 0 also answers in BF16.")


class CheckpointConfig(Section):
    """Weights and optimiser on disk; steps between are redone from their rollouts."""

    every: int = Field(20, ge=1, le=1_000_000, description="Steps between checkpoints.")
    keep: int = Field(2, ge=1, le=1_000_000, description="Checkpoints kept, besides the last.")


class KeepConfig(Section):
    """Steps whose artifacts `fp8-grpo gc` leaves; a step that any rule names is kept."""

    last: int = Field(1, ge=1, le=10_000_000, description="The last n steps.")
    every: int | None = Field(None, ge=1, le=10_000_000, description="Every n-th step.")


class ArtifactsConfig(Section):
    keep: KeepConfig | None = Field(None, description="What `fp8-grpo gc` leaves; null keeps every step.")


class ReplayConfig(Section):
    """Equality that a replayed or redone step must have."""

    level: Literal["exact", "deterministic", "tolerant"] = Field(
        "exact", description="What a replay compares (docs/concepts/durability.md)."
    )
    relative: float = Field(0.05, ge=0, le=1, description="Of tolerant: largest relative difference of a metric.")
    absolute: float = Field(0.01, ge=0, le=1, description="Of tolerant: differences below this always pass.")


class RunConfig(Section):
    name: str = Field(min_length=1, max_length=80, description="Name of the configuration.")
    run: str | None = Field(
        None,
        min_length=1,
        max_length=120,
        pattern=RUN_NAME,
        description="Name of the run and its folder; null makes one. An existing run is continued.",
    )
    runs: UserPath = Field(Path("runs"), description="Folder that holds run folders and the default MLflow store.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Of all random numbers of the run.")
    steps: int = Field(80, ge=1, le=10_000_000, description="GRPO steps.")
    threads: int = Field(1, ge=1, le=1024, description="Torch's threads on the CPU.")
    model: str | None = Field(None, min_length=1, description="Checkpoint: a Hugging Face folder or a hub id.")
    revision: str | None = Field(None, description="Commit of a hub model; pinned in the manifest.")
    architecture: ArchitectureConfig | None = Field(None, description="Build this decoder from scratch instead.")
    data: Data = Field(default_factory=DataConfig, description="One source of prompts, or several by weight.")
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig | None = Field(None, description="What answers the policy turn by turn; null: none.")
    reward: RewardConfig = Field(default_factory=RewardConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    logprobs: LogprobsConfig = Field(default_factory=LogprobsConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    precision: PrecisionContract = Field(default_factory=PrecisionContract)
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    alignment: AlignmentConfig = Field(default_factory=AlignmentConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    artifacts: ArtifactsConfig = Field(default_factory=ArtifactsConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    parity: ParityConfig = Field(default_factory=ParityConfig)
    pipeline: PipelineConfig

    @property
    def sources(self) -> dict[str, DataConfig]:
        """By name; a single source has the name ``."""
        return {"": self.data} if isinstance(self.data, DataConfig) else {**self.listed_sources}

    @property
    def listed_sources(self) -> dict[str, SourceConfig]:
        """Empty where `data` is a single source."""
        return {} if isinstance(self.data, DataConfig) else {source.name: source for source in self.data}

    @property
    def source_rewards(self) -> dict[str, RewardConfig]:
        """`reward` with the verifier of each source of a list."""
        return {
            name: self.reward
            if source.verifier is None
            else self.reward.model_copy(update={"verifier": source.verifier, "options": source.options})
            for name, source in self.listed_sources.items()
        }

    @property
    def verifier_settings(self) -> dict[str, str]:
        """By source, the setting that names its verifier, as `key=value`."""
        own = {name: source.verifier for name, source in self.listed_sources.items()}
        main = f"reward.verifier={self.reward.verifier}"
        return {name: f"{data_key(name)}.verifier={path}" if (path := own.get(name)) else main for name in self.sources}

    @property
    def verifiers(self) -> list[NamedVerifier]:
        main, others = self.reward, self.reward.others
        own = [source for source in self.listed_sources.values() if source.verifier is not None]
        rest = self.sources.keys() - {source.name for source in own}
        return [
            NamedVerifier("reward", main.verifier, main.options, rest),
            *(NamedVerifier(f"reward.others.{o.name}", o.verifier, o.options, self.sources) for o in others),
            *(NamedVerifier(data_key(o.name), o.verifier or "", o.options, [o.name]) for o in own),
        ]

    @property
    def messages_are_scored(self) -> bool:
        """True if a verifier reads the messages of a prompt, beside its text."""
        return any(each.name in ("judge", "reward_model") for each in self.verifiers)

    @property
    def judges(self) -> dict[str, JudgeOptions]:
        """The options of every judge, by their key."""
        judges = (each for each in self.verifiers if each.name == "judge")
        return {f"{judge.section}.options": JudgeOptions.model_validate(judge.options) for judge in judges}

    @property
    def data_title(self) -> str:
        """`chain`, or of a list `easy=a.jsonl, hard=b.jsonl`."""
        return ", ".join(f"{name}={data.source}" if name else data.source for name, data in self.sources.items())

    @property
    def is_generated(self) -> bool:
        """True if all prompts are of the chain task."""
        return all(data.source == "chain" for data in self.sources.values())

    @property
    def vocabulary_size(self) -> int:
        """Of a model from scratch: the characters of the generated task, or of ASCII text, leave some tokens unused."""
        return 32 if self.is_generated else 128

    @property
    def max_prompt_tokens(self) -> int:
        return max(data.max_prompt_tokens for data in self.sources.values())

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the steps of the pipeline depend on: a step, an input or an output may be there only with one."""
        by_use = self.rollout.refill is not None or self.rollout.retire_after is not None
        features: dict[Feature, bool] = {
            "environment": self.environment is not None,
            "synchronous": self.pipeline.mode == "synchronous",
            "prompts_first": self.pipeline.mode == "synchronous" and not by_use,
            "ahead": self.pipeline.mode != "synchronous",
            "by_step": not by_use,
            "by_use": by_use,
            "refill": self.rollout.refill is not None,
            "scoring_pass": self.logprobs.source == "pass",
            "scoring_update": self.logprobs.source != "pass",
            "judge": bool(self.judges),
            "mixed_reference": self.loss.reference is not None,
            "judge_by_use": bool(self.judges) and by_use,
        }
        return frozenset(feature for feature, present in features.items() if present)

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        for problem in chain(
            # Sources of one name would hide each other.
            _data_problems(self),
            _model_problems(self),
            _update_problems(self),
            _episode_problems(self),
            _judge_problems(self),
        ):
            raise ValueError(problem)
        return self


def _model_problems(config: RunConfig) -> Iterator[str]:
    if (config.model is None) == (config.architecture is None):
        yield "exactly one of `model` (a checkpoint folder or hub id) and `architecture` (from scratch) must be set"
    if (warm := config.warm_start) is not None:
        chains = [data for data in config.sources.values() if data.source == "chain"]
        if warm.demonstrations is None and not chains:
            yield (
                f"warm_start makes demonstrations of the chain task, but data.source is {config.data_title}; "
                "set warm_start.demonstrations to a file of your own, or warm_start to null"
            )
        if warm.step_by_step_share + warm.tool_share > 1:
            yield "warm_start.step_by_step_share and tool_share are more than 1 together"
        environment = config.environment
        for modulus in {data.chain.modulus for data in chains or config.sources.values()} if warm.tool_share else ():
            options = {"modulus": modulus, "left_to_right": True}
            if environment is None or environment.options != options:
                yield (
                    f"warm_start.tool_share={warm.tool_share} needs environment.name=calculator with options "
                    f"{{modulus: {modulus}, left_to_right: true}}, the rules of the chain task"
                )
    if config.training.trainer == "megatron":
        grid, ranks = config.training.megatron, config.cluster.ranks
        for name, group in (("tensor_parallel", grid.tensor_parallel), ("expert_parallel", grid.expert_parallel)):
            if ranks % group:
                yield f"cluster.ranks={ranks} is no multiple of training.megatron.{name}={group}"
    if config.cluster.ranks % config.training.context_parallel:
        shared = config.training.context_parallel
        yield f"cluster.ranks={config.cluster.ranks} is no multiple of training.context_parallel={shared}"


def _data_problems(config: RunConfig) -> Iterator[str]:
    if isinstance(config.data, DataConfig):
        return
    if len(config.sources) < len(config.data):
        yield "data: two sources have one name"
    if config.evaluation.source is not None:
        yield f"evaluation.source={config.evaluation.source}: data is a list; set heldout of a source instead"
    warm = config.warm_start
    first, *others = config.data
    if warm is not None and warm.demonstrations is not None and any(first.prompt_form != o.prompt_form for o in others):
        yield (
            f"warm_start.demonstrations={warm.demonstrations}: the sources of data have different fields, templates or "
            "system prompts, so a demonstration has no one prompt; give them the same"
        )
    if config.environment is not None and any(first.template_arguments != o.template_arguments for o in others):
        yield "data: with an environment all sources need the same template_arguments, which write its later turns"


def _update_problems(config: RunConfig) -> Iterator[str]:
    rollout, training, loss, source = config.rollout, config.training, config.loss, config.logprobs.source
    if training.minibatches > (sequences := rollout.prompts_per_step * rollout.group_size):
        yield f"training.minibatches={training.minibatches} exceeds {sequences} rollouts a step"
    if source == "training" and training.minibatches > 1:
        yield (
            f"logprobs.source={source}: of training.minibatches={training.minibatches} updates only the first starts "
            "from the policy that the log-probs are of; set it to pass, or to rollout where both sides are equal"
        )
    if loss.reference is not None and loss.reference.mix < 1 and training.lora is not None:
        yield f"loss.reference.mix={loss.reference.mix} with training.lora: adapters do not mix; set it to 1"
    if (schedule := training.learning_rate_schedule).kind != "constant":
        over = schedule.over_steps or config.steps
        place = f"training.learning_rate_schedule: kind={schedule.kind} over {over} steps"
        if over * training.updates <= training.warmup_steps:
            yield f"{place} ends within training.warmup_steps={training.warmup_steps}; lower the warm-up"
    if rollout.group_size == 1 and rollout.refill is not None:
        yield "rollout.refill: a group of rollout.group_size=1 never has a signal; unset one of both"
    teaches_alone = loss.distillation.weight > 0 and loss.distillation.rewards == 0
    if rollout.group_size == 1 and not teaches_alone:
        yield (
            f"rollout.group_size=1: loss.advantage={loss.advantage} compares the completions of a prompt, and "
            "one alone teaches nothing; raise it"
        )


def _episode_problems(config: RunConfig) -> Iterator[str]:
    if (environment := config.environment) is None:
        return
    pipeline, rollout = config.pipeline, config.rollout
    conflicts = {
        # Whole steps are played beside an update; environment.max_concurrent_episodes limits episodes.
        "pipeline.max_inflight_prompts": pipeline.mode == "one_step_off" and pipeline.max_inflight_prompts is not None,
        "rollout.stop_strings": bool(rollout.stop_strings),
        "rollout.router_replay": rollout.router_replay,
    }
    for setting in (setting for setting, is_set in conflicts.items() if is_set):
        yield f"environment.name={environment.name}: no episodes with {setting}; unset one of both"


def _judge_problems(config: RunConfig) -> Iterator[str]:
    sources = {f"{each.section}.options": each.sources for each in config.verifiers}
    for key, judge in config.judges.items():
        columns = [{*config.sources[name].columns} for name in sources[key]] or [set()]
        known = {"question", "answer", "completion", *set.intersection(*columns)}
        for name in set(PLACEHOLDER.findall(judge.template)) - known:
            yield f"{key}.template: {{{name}}} is none of {', '.join(sorted(known))}; name the field in data.columns"


def public_dump(config: RunConfig) -> dict[str, Any]:
    """JSON types with the keys of a configuration file."""
    return config.model_dump(mode="json", by_alias=True)


def without_adapters(config: RunConfig) -> RunConfig:
    """For a policy that is scored as it is: adapters would freeze it first."""
    return config.model_copy(update={"training": config.training.model_copy(update={"lora": None})})


def made_name(name: str, suffix: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).lstrip('._-') or 'run'}-{suffix}"


def shown_place(config: RunConfig, name: str) -> str:
    """A run of this name, as a command takes it."""
    usual = config.runs == RunConfig.model_fields["runs"].default
    return shlex.quote(name if usual else str(config.runs.absolute() / name))


def resume_command(config: RunConfig, name: str) -> str:
    command, store = f"fp8-grpo resume {shown_place(config, name)}", config.tracking.uri
    if store is not None and store == without_passwords(store):
        # `resume` takes no store from the folder, which may be a stranger's.
        command += f" --set {shlex.quote(f'tracking.uri={store}')}"
    return f"{command} --trust" if own_code(config) else command


CLUSTER: Final = "cluster.address"
"""The key of a cluster in `own_code`."""


def own_code(config: RunConfig) -> dict[str, str]:
    """The import paths in a configuration that are not this project's own, and servers, by the key that has them.

    A Ray cluster and its driver send each other pickled objects: each can run code on the other. A judge gets
    completions, and a key of the user's.
    """
    code_paths = {f"pipeline.steps.{step.name}.uses": step.uses for step in config.pipeline.steps}
    own_paths = {key: path for key, path in code_paths.items() if not is_shipped(path)}
    choices = (
        *((f"{each.section}.verifier", each.name, SHIPPED_VERIFIERS) for each in config.verifiers),
        ("loss.policy", config.loss.policy, SHIPPED_LOSSES),
        ("rollout.engine", config.rollout.engine, ENGINES),
        ("training.optimiser.name", config.training.optimiser.name, OPTIMISERS),
        *((("environment.name", config.environment.name, SHIPPED_ENVIRONMENTS),) if config.environment else ()),
        *((f"tracking.services.{at}", path, TRACKERS) for at, path in enumerate(config.tracking.services)),
    )
    for key, judge in config.judges.items():
        own_paths[f"{key}.url"] = judge.url if judge.key_variable is None else f"{judge.url} with {judge.key_variable}"
    if config.cluster.address is not None:
        own_paths[CLUSTER] = config.cluster.address
    return own_paths | {key: path for key, path, builtin_paths in choices if path not in builtin_paths}
