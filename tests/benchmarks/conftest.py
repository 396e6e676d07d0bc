"""A fake engine, for the rows that benchmarks write about one."""

import pytest

from benchmarks import vllm_hopper_cases as cases

DESCRIBED = {
    "model": "aligned",
    "backend": {"implementation": "DecodeImpl", "version": 3, "cache": "fp8"},
    "kernels": {"qkv_proj": "deep_gemm"},
    "runner": "vllm.v1.worker.gpu.model_runner",
    "linear": ["fp8_block"],
    "dtypes": {},
    "scales": [],
}


class PretendEngine:
    """Describes itself, and can be closed."""

    def describe(self):
        return DESCRIBED

    def close(self):
        pass


@pytest.fixture
def pretend_engine(monkeypatch):
    """Nothing of `vllm_hopper_cases` starts or times anything: rollouts have the speeds given for their length."""

    def start(*arguments, **_):
        arguments[4].append({"kind": "start", "seconds": 1.0})
        return PretendEngine()

    def install(speeds):
        left = {length: iter(found) for length, found in speeds.items()}

        def timed_rollout(engine, requests, prompt, generated, seed, stop_ids=frozenset()):
            sizes = {"requests": requests, "prompt": prompt, "generated": generated, "tokens": requests * generated}
            speed = {"seconds": 1.0, "tokens_per_s": 1.0 if seed == 0 else next(left[generated])}
            waits = {"collections": {"count": 0, "all": 0.0, "max": 0.0}, "processors": []}
            return {**sizes, **speed, "step_ms": [{"median": 1.0, "p99": 1.0, "max": 1.0}], **waits}

        monkeypatch.setattr(cases, "start", start)
        monkeypatch.setattr(cases, "synchronise", lambda *_: {"bytes": 1, "tensors": 1, "seconds": 1.0})
        monkeypatch.setattr(cases, "random_policy", lambda *_, **__: None)
        monkeypatch.setattr(cases, "timed_rollout", timed_rollout)
        return start

    return install
