"""Demonstrations of the supervised warm start: rows of the user's own, or worked examples of the chain task."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8core.config.run import RunConfig, WarmStartConfig
from fp8core.data.chain import ChainSource
from fp8core.data.prompt import PromptSource, encode_prompt
from fp8core.data.source import in_epochs, read_jsonl
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenisedDemonstration:
    """Prompt and completion as token ids; the completion ends with the end-of-sequence token."""

    prompt: Sequence[int]
    completion: Sequence[int]


Draw = Callable[[int], Sequence[TokenisedDemonstration]]
"""From the step of a warm start to its batch; a pure function."""


def chain_batches(config: RunConfig, warm: WarmStartConfig, source: PromptSource, tokenizer: Tokenizer) -> Draw:
    """Worked examples of the chain task."""
    assert isinstance(source, ChainSource), "RunConfig demands a file of demonstrations elsewhere"

    def drawn(step: int) -> list[TokenisedDemonstration]:
        rows = source.demonstrations(step, warm.batch_size, config.seed, warm.step_by_step_share)
        encode = tokenizer.encode
        return [TokenisedDemonstration(encode(row.question), encode(row.completion)) for row in rows]

    return drawn


def own_batches(config: RunConfig, warm: WarmStartConfig, rows: Sequence[TokenisedDemonstration]) -> Draw:
    """All of the user's rows, in an order of its own each epoch."""
    return lambda step: in_epochs(rows, step, warm.batch_size, config.seed, "demonstrations")


def own_demonstrations(
    config: RunConfig, warm: WarmStartConfig, tokenizer: Tokenizer, max_positions: int
) -> list[TokenisedDemonstration]:
    """All rows of `warm_start.demonstrations`, each with the prompt that a rollout of its question has.

    Raises:
        UserError: the file cannot be read, or a row (`file:line`) is no demonstration or longer than the model takes.
    """
    assert warm.demonstrations is not None, "a file was chosen"
    rows = read_jsonl(Path(warm.demonstrations), config.data.model_copy(update={"answer_field": warm.completion_field}))
    found = []
    for row in rows:
        _text, prompt = encode_prompt(row, config, tokenizer, max_positions)
        completion = [*tokenizer.encode(row.reference), tokenizer.end_id]
        if len(prompt) + len(completion) > max_positions:
            raise UserError(
                f"{row.place}: prompt and completion have {len(prompt)} and {len(completion)} tokens, and the model "
                f"{max_positions} positions"
            )
        found.append(TokenisedDemonstration(prompt, completion))
    return found


def digest_of_rows(demonstrations: Sequence[TokenisedDemonstration]) -> str:
    """SHA-256 of the tokens of all rows, in order."""
    digest = hashlib.sha256()
    for row in demonstrations:
        digest.update(f"{list(row.prompt)} {list(row.completion)}\n".encode())
    return digest.hexdigest()
