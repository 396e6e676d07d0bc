"""The policy of a folder answers problems in one precision; the distance of FP8 from BF16 is measured at step 0."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.data.chain import completion
from fp8core.data.demonstrations import chain_tokens
from fp8core.data.prompt import Problem, encode_prompt, prompt_text
from fp8core.errors import UserError
from fp8core.evaluation.measure import (
    Measurement,
    PartCosts,
    compared_prompts,
    contract_in,
    difference_estimate,
    measure,
    score_estimate,
    score_prompt,
)
from fp8core.evaluation.parts import Forward, Subjects, Text, part_costs, subjects_of, whole_forward
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import load_policy, rollout_formats, stored_weights
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.progress import Progress, tell_progress
from fp8core.report.chart import count_text
from fp8core.rewards.final_answer import MARKER
from fp8core.rewards.scorer import Verdict
from fp8core.rewards.verifier import Verifier
from fp8core.rl.alignment_metrics import clamp_exponent
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales, Probe, RolloutEngine
from fp8core.rollout.episodes import EpisodePlayer
from fp8core.rollout.registry import longest_prompt, longest_row
from fp8core.run.batches import scales_of
from fp8core.run.build import build_base, build_engine, build_environment, build_trainer, find_base, open_cluster
from fp8core.run.context import RunContext
from fp8core.run.heldout import all_of, heldout_accuracy
from fp8core.run.open import check_opening, check_stop_strings
from fp8core.run.policy import check_formats, check_report
from fp8core.run.rollouts import (
    check_outcomes,
    ends_of,
    failures,
    groups_of,
    problem_table,
    prompt_table,
    row_tables,
    verdicts_of,
)
from fp8core.store.ledger import START
from fp8core.training.trainer import Trainer

_SEED = 0
# Prompts of which whole distributions are compared.
_TEXTS = 8


def measure_gap(
    run: RunContext, scales: PolicyScales, evaluation: dict[str, Any]
) -> tuple[dict[str, Any], pa.Table | None]:
    """The content of an artifact of kind `precision_gap`, and judgements; `evaluation`: the engine's accuracy."""
    count = compared_prompts(run.config)
    problems = run.source.heldout(run.config.evaluation.prompts)[:count]
    prompts = prompt_table(run, problems)
    tokens = prompts["tokens"].to_pylist()
    names = prompts["prompt_id"].to_pylist()
    groups = groups_of(prompts.to_pylist(), run.config.seed, START, 1)
    sampling = EpisodePlayer.of(run.config, run.tokenizer, run.arch).sampling()
    completions = list[Completion]()
    with run.console.part("precision gap, completions"):
        for part in run.engine.generate(groups, sampling):
            completions += part
            tell_progress(len(completions), count)
    ordered_completions = sorted(completions, key=lambda completion: completion.group)
    answers = [completion.tokens for completion in ordered_completions]
    batch = TokenBatch.of(tokens, answers, truncation=sampling.truncation)
    ours = torch.tensor(
        [logprob for completion in ordered_completions for logprob in completion.logprobs], dtype=torch.float64
    )
    precision = contract_in("bf16", run.config.precision)
    other = run.config.model_copy(update={"precision": precision})
    formats = rollout_formats(precision, run.arch.num_layers)
    masters = run.initial_policy()
    bf16_weights = stored_weights(masters, formats.stored_names(), formats.recipe.weights)
    bf16 = Forward(Decoder(run.arch, formats), load_policy(run.arch, bf16_weights))
    with run.console.part("precision gap, scores in BF16"):
        distances = clamp_exponent(ours - _logprobs_in(run, bf16, batch).double())
    with run.console.part("precision gap, distributions"):
        texts = texts_of(problems[:_TEXTS], run.config, run.tokenizer, longest_row(run.config, run.arch))
        whole = whole_forward(run.config.precision, run.arch, masters, scales.layers)
        cost = part_costs(Subjects(bf16, {"all": whole}), texts, tell_progress).parts["all"]
    with closing(build_engine(other, run.arch)) as engine, run.console.part("precision gap, held-out in BF16"):
        engine.update(bf16_weights, PolicyScales(0, ()), 0)
        bf16_evaluation, _, judgements = heldout_accuracy(run, START, engine, count)
    by_prompt = (evaluation["scores"], bf16_evaluation["scores"])
    fp8_scores, bf16_scores = ([scores[name] for name in names] for scores in by_prompt)
    differences = [a - b for a, b in zip(fp8_scores, bf16_scores, strict=True)]
    content = {
        "prompts": count,
        "tokens": len(distances),
        "temperature": sampling.temperature,
        "nats": float(distances.abs().mean()),
        # Of KL(policy, policy in BF16) from samples of the first: r - 1 - log r, r = exp(-distance).
        "k3": float((torch.expm1(-distances) + distances).mean()),
        "error": float(distances.abs().exp().mean()),
        "kl": cost.nats,
        "same_choice": cost.same_choice,
        "answer_shift": cost.answer_shift,
        "accuracy": asdict(score_estimate(fp8_scores, _SEED)),
        "bf16_accuracy": asdict(score_estimate(bf16_scores, _SEED)),
        "difference": asdict(difference_estimate(differences, _SEED)),
    }
    return content, judgements


def gap_line(gap: dict[str, Any]) -> str:
    ours = gap["accuracy"]["value"]
    theirs = gap["bf16_accuracy"]["value"]
    prompts = count_text(gap["prompts"], "prompt")
    held_out = f"held-out {ours:.3f} and {theirs:.3f} ({prompts})"
    return f"FP8 from BF16 at step 0: KL {gap['kl']:.3g} nats, {held_out}; see the report"


@torch.no_grad()
def _logprobs_in(run: RunContext, bf16: Forward, batch: TokenBatch) -> Tensor:
    temperature = run.config.rollout.temperature
    chunks = list[Tensor]()
    parts = [part for _, part in batch.slices(run.config.training.micro_batch)]
    for part in parts:
        tell_progress(len(chunks), len(parts))
        chunks.append(bf16.decoder.completion_logprobs(bf16.weights, part, temperature)[0])
    return torch.cat(chunks)


def measure_parts(config: RunConfig, problems: Sequence[Problem], progress: Progress) -> PartCosts:
    return part_costs(*read_subjects(config, problems), progress)


def read_subjects(config: RunConfig, problems: Sequence[Problem]) -> tuple[Subjects, list[Text]]:
    """The checkpoint `config.model` in BF16 and by part, and the problems as texts. Raises UserError."""
    base = find_base(config)
    assert base.checkpoint is not None, "an evaluation has a checkpoint"
    texts = texts_of(problems, config, base.tokenizer, longest_row(config, base.arch))
    masters = {name: tensor.float() for name, tensor in base.checkpoint.source().items()}
    without_scales = whole_forward(config.precision, base.arch, masters, ())
    batch = TokenBatch.of_prompts([text.prompt for text in texts[: config.rollout.prompts_per_step]])
    full = replace(without_scales, scales=_calibrated_scales(config, without_scales, batch))
    return subjects_of(full, config.precision, masters), texts


def texts_of(problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, positions: int) -> list[Text]:
    texts = []
    for problem in problems:
        _, prompt = encode_prompt(problem, config, tokenizer, positions)
        answer = right_answer(problem, config, tokenizer)
        texts.append(Text(prompt, answer if len(prompt) + len(answer) <= positions else ()))
    return texts


def right_answer(problem: Problem, config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """Token ids of what follows the last `####` of a reference, or of all of it; none where it cannot be encoded."""
    if config.sources[problem.source].source == "chain":
        return chain_tokens(completion(problem.question, "bare"), tokenizer)
    text = problem.answer.rpartition(MARKER)[2].strip()
    before, chat = prompt_text(problem, config, tokenizer)
    candidates = [text] if chat or before[-1:].isspace() else [f" {text}", text]
    for candidate in candidates if text else ():
        try:
            return tokenizer.encode(candidate)
        except UserError:
            continue
    return []


@torch.no_grad()
def _calibrated_scales(config: RunConfig, forward: Forward, batch: TokenBatch) -> Sequence[LayerScales]:
    if config.precision.rollout.kv_cache != "fp8":
        return ()
    arch = forward.decoder.arch
    formats = forward.decoder.formats
    decoder = Decoder(arch, replace(formats, attention=Bf16Attention(formats.points.weights)))
    statistics = KvStatistics(arch.num_layers)
    for _, part in batch.slices(config.training.micro_batch):
        observe = partial(statistics.observe, valid=part.valid, scales=None)
        decoder.hidden(forward.weights, part.tokens, part.positions, FullContext.of(part.valid), (), observe)
    return scales_of(config, statistics.amax())


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
    for one, verdict in zip(completions, verdicts, strict=True):
        by_prompt[one.group].append(verdict)
    scores = [
        score_prompt(problem.prompt_id, by_prompt[index], questions.k)
        for index, problem in enumerate(questions.problems)
    ]
    sources = [problem.source for problem in questions.problems if problem.source]
    return measure(scores, [one.length for one in completions], questions.seed, sources)
