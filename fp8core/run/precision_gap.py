"""The distance of the policy in FP8 from the same weights in BF16, measured once, before the first update."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.data.chain import completion
from fp8core.data.demonstrations import chain_tokens
from fp8core.data.prompt import Problem, encode_prompt, prompt_text
from fp8core.errors import UserError
from fp8core.evaluation.measure import PartCosts, compared_prompts, contract_in, difference_estimate, score_estimate
from fp8core.evaluation.parts import Forward, Subjects, Text, part_costs, subjects_of, whole_forward
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import load_policy, rollout_formats, stored_weights
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.progress import Progress, tell_progress
from fp8core.report.chart import count_text
from fp8core.rewards.final_answer import MARKER
from fp8core.rl.alignment_metrics import clamp_exponent
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales
from fp8core.rollout.episodes import EpisodePlayer
from fp8core.rollout.registry import longest_row
from fp8core.run.batches import scales_of
from fp8core.run.build import build_engine, find_base
from fp8core.run.context import RunContext
from fp8core.run.heldout import heldout_accuracy
from fp8core.run.rollouts import groups_of, prompt_table
from fp8core.store.ledger import START

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
