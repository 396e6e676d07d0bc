"""The experts that tokens went to, from the arrays in which vLLM and SGLang record them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def routes_of(engine: str, chosen: Any, sparse: Sequence[int], positions: int) -> Tensor:
    """The experts that an engine recorded, as `Completion.experts`: int16 [positions, sparse layers, k], ascending.

    Args:
        chosen: NumPy integers [positions, layers, k], by descending gate weight; zeros in dense layers.
        sparse: layers with experts.
        positions: of prompt and completion, without the last token.

    Raises:
        RuntimeError: positions are missing, or a token went to one expert twice, as where nothing was recorded.
    """
    if chosen is None or chosen.shape[0] != positions:
        found = "nothing" if chosen is None else f"{chosen.shape[0]}"
        raise RuntimeError(f"{engine} recorded the experts of {found} of {positions} positions")
    # In one thread, whatever number torch has: a rollout has millions of these short rows.
    ordered = chosen[:, list(sparse)].astype(np.int16)
    ordered.sort(axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RuntimeError(f"{engine} recorded one expert twice for a token")
    return torch.from_numpy(ordered)
