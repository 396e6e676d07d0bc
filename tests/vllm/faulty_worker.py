"""A worker whose policy can be told to do its work wrong; vLLM imports it by name in its own process."""

from faulty_policy import FaultyPolicy

from fp8core.rollout.vllm.internals import VllmPolicy
from fp8core.rollout.vllm.worker import PolicyWorker


class FaultyVllmPolicy(FaultyPolicy, VllmPolicy):
    experts = "model.layers.0.mlp.experts.routed_experts"


class FaultyWorker(PolicyWorker):
    policy_class = FaultyVllmPolicy
