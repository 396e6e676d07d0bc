"""The part inside SGLang's processes: what is registered there, and a worker that answers for the policy it holds.

SGLang calls `answer` with its model where weights are updated with a loader of the user's own (`custom_weight_loader`).
"""

import pickle
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fp8core.processes import end_with_parent
from fp8core.rollout.sglang.internals import SglangPolicy
from fp8core.rollout.sglang.settings import ALIGNED_QUANTISATION, QUANTISATION

# The attribute of SGLang's model that has our policy.
_POLICY_ATTRIBUTE = "policy_held"


def register() -> None:
    """To be done in every process of SGLang."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.sampler import register_sampler_backend

    from fp8core.rollout.sglang.quantisation import PolicyQuantisation

    if QUANTISATION in ATTENTION_BACKENDS:
        return
    QUANTIZATION_METHODS[QUANTISATION] = PolicyQuantisation
    server_args.add_quantization_method_choices([QUANTISATION])
    server_args.add_attention_backend_choices([QUANTISATION, ALIGNED_QUANTISATION])
    register_attention_backend(QUANTISATION)(_lazily("attention:ScaledAttention"))
    register_attention_backend(ALIGNED_QUANTISATION)(_lazily("aligned:AlignedAttention"))
    register_sampler_backend(QUANTISATION, _lazily("sampler:SeededSampler"))
    register_sampler_backend(ALIGNED_QUANTISATION, _lazily("aligned:AlignedSampler"))


def _lazily(place: str) -> Callable[..., Any]:
    """Processes without a model have no use for what these modules import."""
    module, name = place.split(":")
    return lambda *arguments: getattr(import_module(f"fp8core.rollout.sglang.{module}"), name)(*arguments)


def run_scheduler(*arguments: Any, **settings: Any) -> None:
    end_with_parent.follow_parent()
    register()
    from sglang.srt.managers.scheduler import run_scheduler_process

    if arguments[0].attention_backend == ALIGNED_QUANTISATION:
        # Before the model is made.
        import fp8core.rollout.sglang.aligned  # noqa: F401
    run_scheduler_process(*arguments, **settings)


def run_detokenizer(*arguments: Any, **settings: Any) -> None:
    end_with_parent.follow_parent()
    register()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **settings)


class WorkerError(RuntimeError):
    """Its message has the traceback."""


class Mailbox:
    """One request at a time, and its answer, as files of a folder that both processes know."""

    def __init__(self, folder: str) -> None:
        self._request = Path(folder, "request.pickle")
        self._answer = Path(folder, "answer.pickle")

    def ask(self, method: str, arguments: tuple[Any, ...]) -> None:
        self._answer.unlink(missing_ok=True)
        self._request.write_bytes(pickle.dumps((method, arguments)))

    def asked(self) -> tuple[str, tuple[Any, ...]]:
        method, arguments = pickle.loads(self._request.read_bytes())
        return method, arguments

    def put(self, result: Any, error: str | None) -> None:
        self._answer.write_bytes(pickle.dumps((result, error)))

    def answered(self) -> Any:
        result, error = pickle.loads(self._answer.read_bytes())
        if error is not None:
            raise WorkerError(f"SGLang's worker failed:\n{error}")
        return result


def answer(model: nn.Module, tensors: object) -> None:
    reply(model, SglangPolicy)


def reply(model: nn.Module, policy_class: type[SglangPolicy]) -> None:
    from sglang.srt.server_args import get_global_server_args

    mailbox = Mailbox(get_global_server_args().model_path)
    method, arguments = mailbox.asked()
    try:
        # SGLang keeps nothing of ours but its model.
        policy = getattr(model, _POLICY_ATTRIBUTE, None) or policy_class(model, next(model.parameters()).device)
        setattr(model, _POLICY_ATTRIBUTE, policy)
        mailbox.put(policy.answer(method, *arguments), None)
    except Exception:  # noqa: BLE001 - of what is raised here SGLang would end, without a word to us
        mailbox.put(None, traceback.format_exc())
