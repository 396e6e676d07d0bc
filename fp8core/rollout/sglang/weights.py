"""Where SGLang keeps the tensors that a trainer ships.

SGLang fuses the parts of dense layers as vLLM does, under the same names. It pads the vocabulary to the same multiple.
So the layout is that of `fp8core.rollout.vllm.weights`, which imports no vLLM. Nothing is filled up with zeros.
"""

from collections.abc import Mapping

from fp8core.rollout.engine import TensorSpec
from fp8core.rollout.vllm.weights import Slot, UpdateError, check_fit, find_slots, written_scales

__all__ = ["Slot", "UpdateError", "parameter_slots", "written_scales"]


def parameter_slots(shipped: Mapping[str, TensorSpec], parameters: Mapping[str, TensorSpec]) -> dict[str, Slot]:
    """The place of every shipped tensor, by name; together they fill all parameters.

    Raises:
        UpdateError: naming the first tensor or parameter that does not fit.
    """
    slots = find_slots(shipped, {})
    check_fit(shipped, slots, parameters)
    return slots
