"""A reward model: a sequence classifier of one label, on a device of this process, scores prompt and completion.

Its batches depend on nothing but the completions of a call: a resume and a replay compute the same bits. So it begins
with a step's completions when all are there; with generation ahead, the engine writes meanwhile.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import metadata
from typing import Any

import torch
from pydantic import JsonValue

from fp8core.config.reward import RewardModelOptions
from fp8core.durable import file_digest
from fp8core.errors import UserError, first_line
from fp8core.models.hub import CHECKPOINT_FILES, resolve_model
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import MOST_REWARD, RIGHT, ScoreRequest, Verdict, scorer_crash
from fp8core.rewards.verifier import Verifier
from fp8core.user_files import read_json_object


class RewardModel(Verifier):
    """`section`: of the configuration, which has it and its options. Weights are loaded for the first completion."""

    def __init__(self, section: str, options: RewardModelOptions) -> None:
        """Raises UserError: there is no such checkpoint or device, or no chat template."""
        self._setting = f"{section}.options.model={options.model}"
        self._options = options
        self._folder = resolve_model(options.model, options.revision, key=f"{section}.options.model").folder
        config = read_json_object(self._folder / "config.json")
        names = config.get("architectures")
        if not (isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)):
            raise UserError(f"{self._setting}: it is no sequence classifier; its architectures are {names}")
        self._tokenizer = Tokenizer.load(self._folder)
        if not self._tokenizer.has_template:
            raise UserError(f"{self._setting}: it has no chat template; save one with its tokenizer")
        gpus = torch.cuda.device_count()
        if options.device != "cpu" and int(options.device.partition(":")[2] or 0) >= gpus:
            raise UserError(f"{section}.options.device={options.device}: torch finds {gpus} GPUs here")

    def verify(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """Raises UserError: the weights cannot be used, or the chat template fails."""
        tokens = {request: self._tokens(request) for request in requests}
        ordered = sorted(tokens, key=lambda request: (len(tokens[request]), request))
        verdicts = dict[ScoreRequest, Verdict]()
        for batch in self._batches(ordered):
            scores = self._scores([tokens[request][-self._options.max_tokens :] for request in batch])
            verdicts |= {
                request: self._verdict(score, len(tokens[request]))
                for request, score in zip(batch, scores, strict=True)
            }
        return [verdicts[request] for request in requests]

    def faults(self, answers: Sequence[tuple[str, str]], source: str = "") -> list[str | None]:
        return [None] * len(answers)

    def describe(self) -> dict[str, JsonValue]:
        return {"verifier": "reward_model", "weights": self._digest, "transformers": metadata.version("transformers")}

    def close(self) -> None:
        self.__dict__.pop("_model", None)

    @cached_property
    def _digest(self) -> str:
        """SHA-256 over the sorted (name, SHA-256) of the files that are read."""
        files = sorted(file for pattern in CHECKPOINT_FILES for file in self._folder.glob(pattern))
        lines = "".join(f"{file.name}\n{file_digest(file)}\n" for file in files)
        return hashlib.sha256(lines.encode()).hexdigest()

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                self._folder,
                dtype=getattr(torch, self._options.dtype),
                use_safetensors=True,  # Others are pickles, which may run code.
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self._setting}: it cannot be loaded: {first_line(error)}") from error
        if loading["missing_keys"]:
            raise UserError(f"{self._setting}: it has no weights {', '.join(sorted(loading['missing_keys'])[:3])}")
        if model.num_labels != 1:
            raise UserError(f"{self._setting}: it has {model.num_labels} labels; a reward model has one")
        return model.eval().requires_grad_(False).to(self._options.device)

    @property
    def _pad_id(self) -> int | None:
        pad_id: int | None = self._model.config.get_text_config().pad_token_id
        return pad_id

    def _tokens(self, request: ScoreRequest) -> list[int]:
        turns = [*request.conversation, ("assistant", request.completion)]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return self._tokenizer.encode(self._tokenizer.render(messages, add_generation_prompt=False))
        except UserError as error:
            raise UserError(f"{self._setting}: {error}") from error

    def _batches(self, ordered: Sequence[ScoreRequest]) -> Iterator[Sequence[ScoreRequest]]:
        # The class takes the score at the last token that is no padding, and has none to tell apart.
        size = 1 if ordered and self._pad_id is None else self._options.batch_size
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        pad_id = self._pad_id or 0
        tokens = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = self._options.device
        with torch.inference_mode():
            logits = self._model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores

    def _verdict(self, score: float, length: int) -> Verdict:
        options = self._options
        detail = f"score {score:.6g}"
        if length > options.max_tokens:
            detail += f"; of {length} tokens the last {options.max_tokens}"
        value = 1 / (1 + math.exp(-max(score, -700.0))) if options.sigmoid else score
        reward = options.scale * value + options.offset
        if not abs(reward) <= MOST_REWARD:
            return scorer_crash(f"{detail}: no reward")
        return Verdict(reward, "right" if reward >= RIGHT.score else "wrong", detail)
