"""From a problem to the tokens a policy continues."""

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer

# More than tokenizers put around a text.
_ADDED_TOKENS = 8


def encode_prompt(
    problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int
) -> tuple[str, list[int]]:
    """Text and token ids of a prompt: the template around the question, in the chat template if there is one.

    A chat template writes its own special tokens; a plain prompt gets those of the tokenizer (Llama's BOS).

    Raises:
        UserError: the prompt is empty, longer than allowed, or leaves no room for the completion.
    """
    text, chat = _text(problem, config, tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=not chat)
    limit = _limit(config, max_positions)
    if not 0 < len(tokens) <= limit:
        fitting = f"1 to {limit} fit" if limit > 0 else "none fit"
        place = f"{problem.place}: " if problem.place else ""
        raise UserError(
            f"{place}prompt {problem.prompt_id} ({problem.question[:40]!r}) has {len(tokens)} tokens; {fitting} "
            f"(data.max_prompt_tokens={config.data.max_prompt_tokens}, {max_positions} positions of the model, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens})"
        )
    return text, tokens


def refuse_too_long(problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int) -> None:
    """Raises UserError as `encode_prompt`, at the cost of encoding only where the text is long.

    A token stands for a byte at least; where a tokenizer's normaliser lengthens a text, `encode_prompt` still refuses.
    """
    text, _ = _text(problem, config, tokenizer)
    if len(text.encode()) + _ADDED_TOKENS > _limit(config, max_positions):
        encode_prompt(problem, config, tokenizer, max_positions)


def _text(problem: Problem, config: RunConfig, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The text of a prompt, and whether a chat template made it."""
    plain = config.data.template.replace("{question}", problem.question)
    chat = tokenizer.chat_prompt(plain) if config.data.chat else None
    return (plain, False) if chat is None else (chat, True)


def _limit(config: RunConfig, max_positions: int) -> int:
    """Tokens of the longest prompt that is accepted."""
    return min(config.data.max_prompt_tokens, max_positions - config.rollout.max_new_tokens)
