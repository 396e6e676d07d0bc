"""A worker whose policy can be told to do its work wrong; SGLang imports it by name in its own process."""

from typing import Any

from faulty_policy import FaultyPolicy

from fp8core.rollout.sglang.internals import SglangPolicy
from fp8core.rollout.sglang.worker import reply


class FaultySglangPolicy(FaultyPolicy, SglangPolicy):
    """A policy of SGLang with faults."""


def answer(model: Any, tensors: object) -> None:
    """As `fp8core.rollout.sglang.worker.answer`."""
    reply(model, FaultySglangPolicy)
