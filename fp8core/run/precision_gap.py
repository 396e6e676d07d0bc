"""The distance of the policy in FP8 from the same weights in BF16, measured once, before the first update.

Rollout and training may agree bit for bit and still compute another function than BF16 does. So step 0 samples
completions as the run does, in the rollout's precision, and scores each of their tokens in BF16 too. It compares whole
distributions on a few held-out prompts and their right answers (`evaluation.parts`). And it answers held-out prompts in
BF16, by an engine in this process. On a CPU that takes its weights alone; on a GPU it would need memory that no plan
counts.
"""

from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fp8core.evaluation.measure import (
    compared_prompts,
    contract_in,
    difference_estimate,
    score_estimate,
)
from fp8core.evaluation.parts import Forward, Subjects, part_costs, whole_forward
from fp8core.models.decoder import Decoder
from fp8core.models.weights import load_policy, rollout_formats, stored_weights
from fp8core.progress import tell_progress
from fp8core.report.chart import counted
from fp8core.rl.alignment_metrics import clamp_exponent
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales
from fp8core.rollout.registry import longest_row
from fp8core.run.build import build_engine
from fp8core.run.context import RunContext
from fp8core.run.parts import texts_of
from fp8core.run.player import EpisodePlayer
from fp8core.run.rollouts import heldout_accuracy, prompt_groups, prompt_table
from fp8core.store.ledger import START

_CONFIDENCE, _SEED = 0.95, 0
# Prompts of which whole distributions are compared.
_TEXTS = 8


def measure_gap(run: RunContext, scales: PolicyScales, evaluated: dict[str, Any]) -> dict[str, Any]:
    """The gap of policy 0, which engine and trainer hold, as JSON types; `evaluated`: the engine's accuracy."""
    count = compared_prompts(run.config)
    problems = run.source.heldout(run.config.evaluation.prompts)[:count]
    prompts = prompt_table(run, problems)
    tokens, names = prompts["tokens"].to_pylist(), prompts["prompt_id"].to_pylist()
    groups = prompt_groups(run, START, prompts, 1)
    sampling = EpisodePlayer.of(run.config, run.tokenizer, run.arch).sampling()
    finished = list[Completion]()
    with run.console.part("precision gap, completions"):
        for batch_done in run.ready_engine().generate(groups, sampling):
            finished += batch_done
            tell_progress(len(finished), count)
    sampled = sorted(finished, key=lambda done: done.group)
    batch = TokenBatch.of(tokens, [done.tokens for done in sampled])
    if sampling.truncation is None:
        ours = torch.tensor([logprob for done in sampled for logprob in done.logprobs], dtype=torch.float64)
    else:
        # BF16 may leave out a token that was sampled: both sides score under whole distributions, as a reference does.
        ours = _whole_logprobs(run, batch, scales).double()
    precision = contract_in("bf16", run.config.precision)
    other = run.config.model_copy(update={"precision": precision})
    formats, masters = rollout_formats(precision, run.arch.num_layers), run.initial_policy()
    stored = stored_weights(masters, formats.stored_names(), formats.recipe.weights)
    bf16 = Forward(Decoder(run.arch, formats), load_policy(run.arch, stored))
    with run.console.part("precision gap, scores in BF16"):
        distances = clamp_exponent(ours - _logprobs_in(run, bf16, batch).double())
    with run.console.part("precision gap, distributions"):
        texts = texts_of(problems[:_TEXTS], run.config, run.tokenizer, longest_row(run.config, run.arch))
        whole = whole_forward(run.config.precision, run.arch, masters, scales.layers)
        cost = part_costs(Subjects(bf16, {"all": whole}), texts, tell_progress).parts["all"]
    with closing(build_engine(other, run.arch)) as engine, run.console.part("precision gap, held-out in BF16"):
        engine.update(stored, PolicyScales(0, ()), 0)
        scores = heldout_accuracy(run, engine, count)[0]["scores"]
    scored, scored_in_bf16 = ([found[name] for name in names] for found in (evaluated["scores"], scores))
    differences = [a - b for a, b in zip(scored, scored_in_bf16, strict=True)]
    return {
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
        "accuracy": asdict(score_estimate(scored, _CONFIDENCE, _SEED)),
        "bf16_accuracy": asdict(score_estimate(scored_in_bf16, _CONFIDENCE, _SEED)),
        "difference": asdict(difference_estimate(differences, _CONFIDENCE, _SEED)),
    }


def gap_line(gap: dict[str, Any]) -> str:
    ours, theirs = gap["accuracy"]["value"], gap["bf16_accuracy"]["value"]
    prompts = counted(gap["prompts"], "prompt")
    held_out = f"held-out {ours:.3f} and {theirs:.3f} ({prompts})"
    return f"FP8 from BF16 at step 0: KL {gap['kl']:.3g} nats, {held_out}; see the report"


def _whole_logprobs(run: RunContext, batch: TokenBatch, scales: PolicyScales) -> Tensor:
    """FP32 log-prob of every completion token in order, by the trainer: a run that truncates has equal sides."""
    scored = run.ready_trainer().logprobs(batch, run.config.rollout.temperature, scales.layers).logprobs
    return scored[~scored.isnan()]


@torch.no_grad()
def _logprobs_in(run: RunContext, bf16: Forward, batch: TokenBatch) -> Tensor:
    """FP32 log-prob of every completion token in order, in BF16."""
    temperature = run.config.rollout.temperature
    found, parts = list[Tensor](), [part for _, part in batch.slices(run.config.training.micro_batch)]
    for part in parts:
        tell_progress(len(found), len(parts))
        found.append(bf16.decoder.completion_logprobs(bf16.weights, part, temperature)[0])
    return torch.cat(found)
