"""Demonstrations of the supervised warm start: rows of the user's own, or worked examples of the chain task."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8core.config.model import WarmStartConfig
from fp8core.config.run import RunConfig
from fp8core.data.chain import EOS, ChainSource, Demonstration, running_values, tool_call
from fp8core.data.mixed import MixedSource
from fp8core.data.prompt import PromptSource, encode_prompt
from fp8core.data.source import read_file
from fp8core.environments.chat import OBSERVATION
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rl.batch import TokenBatch


@dataclass(frozen=True)
class TokenisedDemonstration:
    """Prompt and completion as token ids; the completion ends with the end-of-sequence token.

    `policy_mask`: which of its tokens the policy learns to write; the others are a tool's. None: all.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    policy_mask: Sequence[bool] | None = None


def demonstration_batch(rows: Sequence[TokenisedDemonstration]) -> TokenBatch:
    batch = TokenBatch.of([row.prompt for row in rows], [row.completion for row in rows])
    for place, row in enumerate(rows):
        if row.policy_mask is not None:
            begin = len(row.prompt)
            batch.response_mask[place, begin : begin + len(row.policy_mask)] = torch.tensor(row.policy_mask)
    return batch


def chain_demonstrations(
    step: int, config: RunConfig, warm: WarmStartConfig, source: PromptSource, tokenizer: Tokenizer
) -> list[TokenisedDemonstration]:
    """The batch of a step of a warm start; a pure function. Chain tasks of a list take turns."""
    parts = source.parts.values() if isinstance(source, MixedSource) else [source]
    chains = [part for part in parts if isinstance(part, ChainSource)]
    rows = chains[step % len(chains)].demonstrations(
        step, warm.batch_size, config.seed, warm.step_by_step_share, warm.tool_share
    )
    return [_tokenise(row, tokenizer) for row in rows]


def chain_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a text that ends with EOS; a model that also reads other data has another token for that."""
    return [*tokenizer.encode(text.removesuffix(EOS)), tokenizer.end_id]


def _tokenise(row: Demonstration, tokenizer: Tokenizer) -> TokenisedDemonstration:
    prompt = tokenizer.encode(row.question)
    completion = chain_tokens(row.completion, tokenizer)
    if row.style != "tool":
        return TokenisedDemonstration(prompt, completion)
    call = chain_tokens(tool_call(row.question), tokenizer)
    answer = tokenizer.encode(f"{OBSERVATION}{running_values(row.question)[-1]}")
    policy_mask = [True] * len(call) + [False] * len(answer) + [True] * len(completion)
    return TokenisedDemonstration(prompt, [*call, *answer, *completion], policy_mask)


def own_demonstrations(
    config: RunConfig, warm: WarmStartConfig, tokenizer: Tokenizer, max_positions: int
) -> list[TokenisedDemonstration]:
    """All rows of `warm_start.demonstrations`, each with the prompt that a rollout of its question has. Raises
    UserError: the file cannot be read, or a row (`file:line`) is no demonstration or longer than the model takes."""
    assert warm.demonstrations is not None, "a file was chosen"
    source, data = next(iter(config.sources.items()))
    rows = read_file(Path(warm.demonstrations), data.model_copy(update={"answer_field": warm.completion_field}))
    demonstrations = []
    for row in (replace(row, source=source) for row in rows):
        _text, prompt = encode_prompt(row, config, tokenizer, max_positions)
        try:
            completion = [*tokenizer.encode(row.answer), tokenizer.end_id]
        except UserError as error:
            raise UserError(f"{row.place}: {error}") from error
        if len(prompt) + len(completion) > max_positions:
            raise UserError(
                f"{row.place}: prompt and completion have {len(prompt)} and {len(completion)} tokens, and the model "
                f"{max_positions} positions"
            )
        demonstrations.append(TokenisedDemonstration(prompt, completion))
    return demonstrations


def digest_of_rows(demonstrations: Sequence[TokenisedDemonstration]) -> str:
    digest = hashlib.sha256()
    for row in demonstrations:
        digest.update(f"{list(row.prompt)} {list(row.completion)}\n".encode())
    return digest.hexdigest()
