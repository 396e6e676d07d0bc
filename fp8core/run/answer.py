"""Answer the problems of an evaluation with the policy of a folder, in one precision; a verifier checks the answers."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.evaluation.measure import Measurement, measure, score_prompt
from fp8core.evaluation.parts import Text
from fp8core.progress import Progress
from fp8core.rewards.scorer import Verdict
from fp8core.rewards.verifier import Verifier
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales, Probe, RolloutEngine
from fp8core.rollout.episodes import EpisodePlayer
from fp8core.rollout.registry import longest_prompt, longest_row
from fp8core.run.batches import scales_of
from fp8core.run.build import build_base, build_engine, build_environment, build_trainer, open_cluster
from fp8core.run.heldout import all_of
from fp8core.run.open import check_opening, check_stop_strings
from fp8core.run.policy import check_formats, check_report
from fp8core.run.precision_gap import texts_of
from fp8core.run.rollouts import check_outcomes, ends_of, failures, groups_of, problem_table, row_tables, verdicts_of
from fp8core.training.trainer import Trainer


@dataclass(frozen=True)
class Questions:
    """The seed of a sample depends on its place alone: precisions differ by their arithmetic, and not by their luck."""

    problems: list[Problem]
    samples: int
    temperature: float
    seed: int
    k: Sequence[int]
    text_count: int = 0


@dataclass(frozen=True)
class PrecisionAnswers:
    measurement: Measurement
    engine: dict[str, object]
    remark: str | None
    answer_logprob: float | None


def answer(config: RunConfig, questions: Questions, verifier: Verifier, progress: Progress) -> PrecisionAnswers:
    """Raises UserError: model or prompts cannot be used, or no answer could be checked; SyncError."""
    base = build_base(config)
    check_stop_strings(config, base.tokenizer)
    positions = longest_row(config, base.arch)
    prompts = problem_table(questions.problems, config, base.tokenizer, positions).to_pylist()
    tokens = [row["tokens"] for row in prompts]
    with ExitStack() as parts:
        pool = None
        if config.environment is not None:
            pool = parts.enter_context(closing(build_environment(config.environment)))
            check_opening(questions.problems, config, base.tokenizer, positions, pool, questions.seed)
        if (cluster := open_cluster(config)) is not None:
            parts.callback(cluster.close)
        engine = build_engine(config, base.arch, cluster)
        parts.callback(engine.close)
        with closing(build_trainer(config, base.arch, base.tensors, cluster)) as trainer:
            _load(engine, trainer, config, tokens)
        player = EpisodePlayer.of(config, base.tokenizer, base.arch)
        groups = groups_of(prompts, questions.seed, 0, questions.samples)
        batches = player.play(engine, groups, prompts, player.evaluation_sampling(questions.temperature), pool)
        episodes = all_of(batches, len(prompts) * questions.samples, progress)
        texts = texts_of(questions.problems[: questions.text_count], config, base.tokenizer, positions)
        answer_logprob = _answer_logprob(engine, config, texts, positions)
        description = engine.describe()
    rollouts, turns = row_tables(episodes, config, base.tokenizer)
    check_outcomes(config, turns)
    verdicts = verdicts_of(verifier, ends_of(prompts, rollouts, turns))
    measurement = _measurement(questions, episodes, verdicts)
    return PrecisionAnswers(measurement, description, failures(config, verdicts), answer_logprob)


def _load(engine: RolloutEngine, trainer: Trainer, config: RunConfig, prompts: list[list[int]]) -> None:
    batch = TokenBatch.of_prompts(prompts[: config.rollout.prompts_per_step])
    scales = PolicyScales(0, tuple(scales_of(config, trainer.statistics(batch).amax())))
    weights = trainer.export()
    check_report(engine.update(weights, scales, 0), weights.digest(), scales, 0)
    check_formats(engine.describe(), config.precision)


def _answer_logprob(engine: RolloutEngine, config: RunConfig, texts: Sequence[Text], positions: int) -> float | None:
    longest = longest_prompt(config, positions)
    fitting = [text for text in texts if text.answer and len(text.prompt) + len(text.answer) - 1 <= longest]
    probes = [Probe((*text.prompt, *text.answer[:i]), token) for text in fitting for i, token in enumerate(text.answer)]
    size = config.rollout.max_batch
    logprobs = [engine.score(probes[start : start + size], 1.0)[0] for start in range(0, len(probes), size)]
    return math.fsum(chain.from_iterable(logprobs)) / len(fitting) if fitting else None


def _measurement(questions: Questions, completions: list[Completion], verdicts: list[Verdict]) -> Measurement:
    by_prompt: dict[int, list[Verdict]] = defaultdict(list)
    for completion, verdict in zip(completions, verdicts, strict=True):
        by_prompt[completion.group].append(verdict)
    scores = [
        score_prompt(problem.prompt_id, by_prompt[index], questions.k)
        for index, problem in enumerate(questions.problems)
    ]
    sources = [problem.source for problem in questions.problems if problem.source]
    return measure(scores, [completion.length for completion in completions], questions.seed, sources)
