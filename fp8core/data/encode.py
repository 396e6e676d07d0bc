"""From a problem to the tokens a policy continues."""

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer


def encode_prompt(
    problem: Problem, config: RunConfig, tokenizer: Tokenizer, max_positions: int
) -> tuple[str, list[int]]:
    """Text and token ids of a prompt: the template around the question, in the chat template if there is one.

    A chat template writes its own special tokens; a plain prompt gets those of the tokenizer (Llama's BOS).

    Raises:
        UserError: the prompt is empty, longer than allowed, or leaves no room for the completion.
    """
    plain = config.data.template.replace("{question}", problem.question)
    chat = tokenizer.chat_prompt(plain) if config.data.chat else None
    text = plain if chat is None else chat
    tokens = tokenizer.encode(text, add_special_tokens=chat is None)
    limit = min(config.data.max_prompt_tokens, max_positions - config.rollout.max_new_tokens)
    if not 0 < len(tokens) <= limit:
        fitting = f"1 to {limit} fit" if limit > 0 else "none fit"
        raise UserError(
            f"prompt {problem.prompt_id} ({problem.question[:40]!r}) has {len(tokens)} tokens; {fitting} "
            f"(data.max_prompt_tokens={config.data.max_prompt_tokens}, {max_positions} positions of the model, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens})"
        )
    return text, tokens
