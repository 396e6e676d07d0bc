"""The part inside SGLang's processes: what is registered there, and a worker that answers for the policy it holds.

SGLang calls `answer` with its model where weights are updated with a loader of the user's own (`custom_weight_loader`).
The request and its answer are files of the engine's folder, which is the model's: `Mailbox`.
"""

import pickle
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8core.processes import end_with_parent
from fp8core.rollout.held_weights import HeldWeights
from fp8core.rollout.sglang import internals
from fp8core.rollout.sglang.settings import ALIGNED, REGISTERED
from fp8core.rollout.shared_weights import SharedWeights, TensorSpec, open_shared
from fp8core.rollout.slots import Share, Slot


def register() -> None:
    """Give SGLang our quantisation method, attention backend and sampler; to be done in every process of it."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.sampler import register_sampler_backend

    from fp8core.rollout.sglang.quantisation import PolicyQuantisation

    if REGISTERED in ATTENTION_BACKENDS:
        return
    QUANTIZATION_METHODS[REGISTERED] = PolicyQuantisation
    server_args.add_quantization_method_choices([REGISTERED])
    server_args.add_attention_backend_choices([REGISTERED, ALIGNED])
    server_args.add_deterministic_attention_backend_choices([REGISTERED])
    server_args.add_radix_supported_deterministic_attention_backend_choices([REGISTERED])
    register_attention_backend(REGISTERED)(_scaled_attention)
    register_attention_backend(ALIGNED)(_aligned_attention)
    register_sampler_backend(REGISTERED, _seeded_sampler)
    register_sampler_backend(ALIGNED, _aligned_sampler)


def _scaled_attention(runner: Any) -> Any:
    from fp8core.rollout.sglang.attention import ScaledAttention

    return ScaledAttention(runner)


def _aligned_attention(runner: Any) -> Any:
    from fp8core.rollout.sglang.aligned import AlignedAttention

    return AlignedAttention(runner)


def _aligned_sampler() -> Any:
    from fp8core.rollout.sglang.aligned import AlignedSampler

    return AlignedSampler()


def _seeded_sampler() -> Any:
    from fp8core.rollout.sglang.sampler import SeededSampler

    return SeededSampler()


def run_scheduler(*arguments: Any, **settings: Any) -> None:
    """SGLang's process that holds the model: it ends with the one that started it."""
    end_with_parent.follow_parent()
    register()
    from sglang.srt.managers.scheduler import run_scheduler_process

    if arguments[0].attention_backend == ALIGNED:
        # Before the model is made.
        import fp8core.rollout.sglang.aligned  # noqa: F401
    run_scheduler_process(*arguments, **settings)


def run_detokenizer(*arguments: Any, **settings: Any) -> None:
    """SGLang's process that makes text: it ends with the one that started it."""
    end_with_parent.follow_parent()
    register()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **settings)


class WorkerError(RuntimeError):
    """A request that the worker could not fulfil; the message has its traceback."""


class Mailbox:
    """One request at a time, and its answer, as files of a folder that both processes know."""

    def __init__(self, folder: str) -> None:
        self._request, self._answer = Path(folder, "request.pickle"), Path(folder, "answer.pickle")

    def ask(self, method: str, arguments: tuple[Any, ...]) -> None:
        self._answer.unlink(missing_ok=True)
        self._request.write_bytes(pickle.dumps((method, arguments)))

    def asked(self) -> tuple[str, tuple[Any, ...]]:
        method, arguments = pickle.loads(self._request.read_bytes())
        return method, arguments

    def put(self, result: Any, error: str | None) -> None:
        self._answer.write_bytes(pickle.dumps((result, error)))

    def answered(self) -> Any:
        """The result; raises WorkerError with the worker's traceback where it failed."""
        result, error = pickle.loads(self._answer.read_bytes())
        if error is not None:
            raise WorkerError(f"SGLang's worker failed:\n{error}")
        return result


def answer(model: nn.Module, tensors: object) -> None:
    """A loader of weights, as SGLang calls it: the request in the engine's folder gets its answer."""
    reply(PolicyWorker(model))


def reply(worker: "PolicyWorker") -> None:
    from sglang.srt.server_args import get_global_server_args

    mailbox = Mailbox(get_global_server_args().model_path)
    method, arguments = mailbox.asked()
    try:
        with torch.inference_mode():
            mailbox.put(getattr(worker, method)(*arguments), None)
    except Exception:  # noqa: BLE001 - of what is raised here SGLang would end, without a word to us
        mailbox.put(None, traceback.format_exc())


class PolicyWorker:
    """The engine's requests to the model; arguments and results are plain values."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._device = next(model.parameters()).device

    def probe(self) -> list[str]:
        """The parts that this SGLang lacks; where it lacks nothing, scales are marked as never written."""
        missing = internals.probe(self._model)
        if not missing:
            internals.forget_scales(self._model)
        return missing

    def parameters(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._model.named_parameters()}
        return {name: (spec.dtype, spec.shape) for name, spec in specs.items()}

    def begin(self, slots: dict[str, tuple[Any, ...]] | None) -> None:
        """Hold no version and no scales until another policy is written; `slots` are new, or None as they were."""
        self._model.policy_version = None
        internals.forget_scales(self._model)
        if slots is not None:
            share: Share = {name: (Slot(*fields), None) for name, fields in slots.items()}
            # SGLang keeps nothing of ours but its model.
            self._model.policy_held = HeldWeights(self._parameters(), share)

    def write(self, received: SharedWeights) -> list[str]:
        """Copy every shared tensor into its rows, and return the names of the tensors."""
        tensors = open_shared(received, self._device)
        self._model.policy_held.write(self._parameters(), tensors)
        torch.cuda.synchronize(self._device)
        return list(tensors)

    def end(self, version: int) -> None:
        self._model.policy_version = version

    def set_scales(self, scales: list[list[float]]) -> None:
        """Scales of Q, K and V by layer: the last thing that is written."""
        internals.write_scales(self._model, scales)

    def read_back(self) -> dict[str, Any]:
        """Version, lane sums of every tensor from the parameters themselves, and the scales in force."""
        sums = self._model.policy_held.sums(self._parameters())
        return {"version": self._model.policy_version, "sums": sums, "scales": self.held_scales()}

    def held_scales(self) -> list[list[float]]:
        """Scales of Q, K and V by layer, as they are in force; none where the cache needs none."""
        return internals.read_scales(self._model) if internals.has_scales(self._model) else []

    def clear_cache(self) -> None:
        """Zero the KV cache: after sleep it holds whatever bytes were there, NaN among them."""
        for cache in internals.cache_tensors(self._model):
            cache.zero_()

    def describe(self) -> dict[str, Any]:
        return {
            "model": type(self._model).__name__,
            "linears": internals.describe_linears(self._model),
            "attention": internals.describe_attention(self._model),
            "head": internals.describe_head(self._model),
            "scale_rule": internals.describe_scale_rule(self._model),
        }

    def memory(self) -> dict[str, int]:
        """Bytes of the device in use by this process's tensors, and free on it."""
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "free": torch.cuda.mem_get_info(self._device)[0],
        }

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())
