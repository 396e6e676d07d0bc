"""The cost of a configuration's FP8 by part, on its own prompts and right answers, in this process on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from fp8core.config.run import RunConfig
from fp8core.data.chain import completion
from fp8core.data.prompt import Problem, encode_prompt, prompt_text
from fp8core.errors import UserError
from fp8core.evaluation.measure import PartCosts
from fp8core.evaluation.parts import Forward, Subjects, Text, part_costs, subjects_of, whole_forward
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.tokenizer import Tokenizer
from fp8core.numerics.attention import Bf16Attention
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.progress import Progress
from fp8core.rewards.final_answer import MARKER
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.registry import longest_row
from fp8core.run.build import find_base
from fp8core.run.scales import scales_of


def measure_parts(config: RunConfig, problems: Sequence[Problem], progress: Progress) -> PartCosts:
    """KL and the rest by part (`evaluation.parts`) of the checkpoint `config.model` on the problems.

    `progress` hears of texts, and may raise to end it. Raises UserError as `read_subjects`.
    """
    return part_costs(*read_subjects(config, problems), progress)


def read_subjects(config: RunConfig, problems: Sequence[Problem]) -> tuple[Subjects, list[Text]]:
    """The checkpoint `config.model` in BF16 and by part, and the problems as texts.

    Main memory holds about 30 bytes a parameter, whatever the engine is. Scales of an FP8 cache are those of a run:
    calibrated on the first `rollout.prompts_per_step` prompts.

    Raises UserError: the checkpoint cannot be read, or a prompt does not fit.
    """
    base = find_base(config)
    assert base.checkpoint is not None, "an evaluation has a checkpoint"
    texts = texts_of(problems, config, base.tokenizer, longest_row(config, base.arch))
    masters = base.checkpoint.load().tensors
    unscaled = whole_forward(config.precision, base.arch, masters, ())
    batch = TokenBatch.of_prompts([text.prompt for text in texts[: config.rollout.prompts_per_step]])
    full = replace(unscaled, scales=_calibrated(config, unscaled, batch))
    return subjects_of(full, config.precision, masters), texts


def texts_of(problems: Sequence[Problem], config: RunConfig, tokenizer: Tokenizer, positions: int) -> list[Text]:
    """Prompts as a run encodes them, and their right answers. Raises UserError as `encode_prompt`."""
    texts = []
    for problem in problems:
        _, prompt = encode_prompt(problem, config, tokenizer, positions)
        answer = right_answer(problem, config, tokenizer)
        texts.append(Text(prompt, answer if len(prompt) + len(answer) <= positions else ()))
    return texts


def right_answer(problem: Problem, config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """Token ids of what follows the last `####` of a reference, or of all of it, right after the prompt.

    After a prompt without a chat template a space comes first, where the tokenizer has one. A problem of the chain task
    has its bare completion. Nothing where the reference is empty or has a character that the tokenizer lacks.
    """
    if config.data.source == "chain":
        return tokenizer.encode(completion(problem.question, "bare"))
    text = problem.reference.rpartition(MARKER)[2].strip()
    before, chat = prompt_text(problem, config, tokenizer)
    joined = [text] if chat or before[-1:].isspace() else [f" {text}", text]
    for written in joined if text else ():
        try:
            return tokenizer.encode(written)
        except UserError:
            continue
    return []


@torch.no_grad()
def _calibrated(config: RunConfig, unscaled: Forward, batch: TokenBatch) -> Sequence[LayerScales]:
    """As the trainer calibrates: over attention in BF16. Nothing where the cache is not FP8."""
    if config.precision.rollout.kv_cache != "fp8":
        return ()
    arch, formats = unscaled.decoder.arch, unscaled.decoder.formats
    decoder = Decoder(arch, formats.with_attention(Bf16Attention(formats.points.weights)))
    statistics = KvStatistics(arch.num_layers)
    for _, part in batch.slices(config.training.micro_batch):
        observe = partial(statistics.observe, valid=part.valid, scales=None)
        decoder.hidden(unscaled.weights, part.tokens, part.positions, FullContext.of(part.valid), (), observe)
    return scales_of(config, statistics.amax())
