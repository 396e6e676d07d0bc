"""SGLang's sampler with a seed a completion, outside deterministic inference.

A request brings its seed as a parameter of its own (`settings.own_sampler`). A token is a function of its seed, its
position and the log-probs: SGLang's own function, which deterministic inference calls as well.
"""

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

SEED = "seed"


class BringsSeed(CustomLogitProcessor):
    """Changes no logit: SGLang keeps the parameters only of requests that have a processor."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        return logits


class SeededSampler(Sampler):
    """Draws each token by the seed of its request."""

    def forward(self, logits_output: Any, sampling_info: Any, *rest: Any, **more: Any) -> Any:
        """As SGLang's, whose arguments these are."""
        if sampling_info.custom_params is not None and not sampling_info.is_all_greedy:
            seeds = torch.tensor([parameters[SEED] for parameters in sampling_info.custom_params], dtype=torch.int64)
            on_device = seeds.pin_memory().to(sampling_info.temperatures.device, non_blocking=True)
            sampling_info = replace(sampling_info, sampling_seed=on_device)
        return super().forward(logits_output, sampling_info, *rest, **more)

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        # Processors change nothing here, and what is not finite must show in the log-probs.
        return logits
