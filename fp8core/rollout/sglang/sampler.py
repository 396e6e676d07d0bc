"""SGLang's sampler with a seed a completion: a token is a function of its logits, its seed and its position."""

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from fp8core.numerics.logprobs import drawn_tokens
from fp8core.numerics.packed import copy_to
from fp8core.numerics.support import truncated
from fp8core.numerics.truncation import Truncation

SEED = "seed"
TEMPERATURE = "temperature"
TRUNCATION = "truncation"
TARGET = "target"
"""Parameters of a request: of its draws, and of a probe the token whose log-prob it asks for."""


class BringsSeed(CustomLogitProcessor):
    """Changes no logit: SGLang keeps the parameters only of requests that have a processor."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        return logits


def support_logits(logits: Tensor, parameters: list[dict[str, Any]], temperature: float) -> Tensor:
    """Requests that run together have one truncation."""
    truncation = parameters[0].get(TRUNCATION)
    assert all(each.get(TRUNCATION) == truncation for each in parameters), "requests of two kinds run together"
    return truncated(logits, temperature, None if truncation is None else Truncation(**truncation))


def draw_tokens(logits: Tensor, sampling_info: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [B], and their log-probs, FP32 [B], from FP32 [B, V]."""
    seeds = torch.tensor([parameters[SEED] for parameters in sampling_info.custom_params], dtype=torch.int64)
    on_device = copy_to(seeds, logits.device)
    return drawn_tokens(logits, sampling_info.temperatures.flatten(), on_device, positions.long())


class SeededSampler(Sampler):
    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: Tensor,
    ) -> Tensor:
        """Greedy tokens and log-probs of given ones are left to SGLang's: no seed decides those."""
        has_targets = any(ids is not None for ids in token_ids_logprobs)
        if sampling_info.custom_params is None or sampling_info.is_all_greedy or has_targets:
            tokens: Tensor = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            return tokens
        needs_truncation = sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling
        assert not needs_truncation, "requests of one kind run together, and of these none is truncated"
        assert not any(top_logprobs_nums), "nobody asks for the most likely ones"
        parameters = sampling_info.custom_params
        logits = support_logits(logits_output.next_token_logits.float(), parameters, parameters[0][TEMPERATURE])
        tokens, logits_output.next_token_logprobs = draw_tokens(logits, sampling_info, positions)
        return tokens.int()

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        # Processors change nothing here, and what is not finite must show in the log-probs.
        return logits
