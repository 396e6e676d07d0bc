"""vLLM as a rollout engine, with its core in a process of its own."""

import hashlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import vllm.envs
import zmq
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from fp8core.config.engines import VllmConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import EngineLost, UserError
from fp8core.models.architecture import Architecture
from fp8core.numerics.truncation import Truncation
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.resident import SEED_BITS, Output, Request, ResidentEngine, kernels_by_type
from fp8core.rollout.shared_weights import TensorSpec
from fp8core.rollout.slots import Axis, Share, filled_shapes, find_shares
from fp8core.rollout.vllm.entry import memory_shortage
from fp8core.rollout.vllm.internals import (
    end_calls,
    load_model_class,
    register_aligned_models,
)
from fp8core.rollout.vllm.settings import (
    ALIGNED_KERNEL,
    OWN_TOKENS,
    WORKER,
    described_formats,
    engine_arguments,
    executed_points,
    model_config,
    required_environment,
)

Result = TypeVar("Result")
_LOWEST_TEMPERATURE = 0.01
# For the worker to let go of the device; then vLLM ends its processes whatever they do.
_SHUTDOWN_SECONDS = 10.0
# Until vLLM itself refuses calls to a core that has ended.
_NOTICE_SECONDS = 0.2


class VllmEngine(ResidentEngine):
    product = "vLLM"
    # False: requests compute all of their prompts, also what is cached.
    reads_prefixes = True

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        options: VllmConfig,
        max_batch: int,
        build: EngineBuild,
        worker: str = WORKER,
        routes: bool = False,
        draft_tokens: int = 0,
    ) -> None:
        """`worker`: qualified name of a `PolicyWorker`. `routes`: whether experts can be reported. `draft_tokens`: of
        the longest draft; 0 for none.

        Raises UserError: the environment was not prepared, or vLLM's share of the GPU is not free.
        """
        _check_environment(required_environment(contract, options, build))
        if not build.on_gpu:
            if arch.experts is not None:
                raise UserError(f"rollout.engine=vllm: {build.label} computes no experts; set it to embedded")
            # Registers the quantisation method that `engine_arguments` names.
            import fp8core.rollout.vllm.in_place  # noqa: F401
        register_aligned_models()
        self._build = build
        self._options = options
        self._is_aligned = options.model == "aligned"
        self._has_drafts = draft_tokens > 0
        # vLLM raises what is below its lowest temperature to that; the aligned model tempers its output itself.
        lowest = 0.0 if self._is_aligned else _LOWEST_TEMPERATURE
        super().__init__(arch, contract, lowest=lowest, sleeps=options.sleep, routes=routes)
        before = multiprocessing.active_children()
        # vLLM reads the folder while it starts. One that is killed later leaves none.
        with tempfile.TemporaryDirectory(prefix="fp8-grpo-") as folder:
            config = model_config(arch, contract, options)
            for name in config["architectures"]:
                load_model_class(name)
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            arguments = engine_arguments(
                *(arch, contract, options, build),
                folder=folder,
                max_batch=max_batch,
                worker=worker,
                routes=routes,
                draft_tokens=draft_tokens,
            )
            try:
                self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=True)
            except RuntimeError as error:
                # vLLM's error names no reason, and its process has written much besides.
                if build.on_gpu and (shortage := memory_shortage(*torch.cuda.mem_get_info(), options)):
                    raise UserError(shortage) from error
                raise
        self._cores = [process for process in multiprocessing.active_children() if process not in before]
        self._is_closed = False
        threading.Thread(target=self._end_calls, daemon=True).start()
        # The worker follows its parent already, which is vLLM's core.
        self.ask_policy("follow", os.getpid())
        self._read_parameters()

    def _description(self, description: Mapping[str, Any]) -> dict[str, object]:
        kernels = dict.fromkeys(kernels_by_type(description["linears"]), ALIGNED_KERNEL)
        return {
            "engine": "vllm",
            "version": f"{self._build.distribution} {self._build.version}",
            **described_formats(description, self._contract, self._arch.num_layers),
            "rounding_points": executed_points(description, self._build),
            **({"kernels": kernels} if self._is_aligned else {}),
            **{name: description[name] for name in ("passes", "custom_ops", "compilation", "graphs", "runner")},
        }

    def close(self) -> None:
        self._is_closed = True
        self._llm.engine_core.shutdown(timeout=_SHUTDOWN_SECONDS)

    def _end_calls(self) -> None:
        """End what waits for an answer of a core that was killed, and what is asked before vLLM has noticed."""
        wait([core.sentinel for core in self._cores])
        while not self._is_closed:
            end_calls(self._llm.engine_core, EngineDeadError())
            time.sleep(_NOTICE_SECONDS)

    def ask_policies(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(self._llm.collective_rpc, "policy_answer", None, (method, *arguments))

    def draft_counts(self) -> Counter[str]:
        return Counter(self.ask_policy("draft_counts")) if self._has_drafts else Counter()

    def drop_prefixes(self) -> bool:
        return bool(self._ask(self._llm.reset_prefix_cache))

    def _ask(self, method: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return method(*arguments)
        except (EngineDeadError, zmq.ZMQError) as error:
            # vLLM closes its sockets once its core has ended, also beneath a call that has begun.
            if isinstance(error, zmq.ZMQError) and all(core.is_alive() for core in self._cores):
                raise
            raise EngineLost("vLLM's engine core ended") from error

    def _find_shares(self, specs: Mapping[str, TensorSpec]) -> list[Share]:
        tile_shapes = filled_shapes(self._arch) if self._is_aligned else {}
        last: Axis = 0 if self._is_aligned else 1
        return find_shares(specs, tile_shapes, self._parameters, self._options.tensor_parallel, last)

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self._ask(self._llm.wake_up, [part])

    def _fall_asleep(self) -> None:
        self._ask(self._llm.sleep, 2)

    def _begin(self, temperature: float, truncation: Truncation | None) -> None:
        if self._is_aligned:
            self.ask_policies("set_distribution", temperature, None if truncation is None else vars(truncation))

    def _submit(self, requests: Mapping[int, Request]) -> None:
        for number, request in requests.items():
            target = request.target
            # The output of an aligned model is tempered, and truncated.
            cut = (None if self._is_aligned else request.truncation) or Truncation()
            parameters = SamplingParams(
                temperature=1.0 if self._is_aligned and request.temperature > 0 else request.temperature,
                top_k=cut.top_k or 0,
                top_p=cut.top_p,
                min_p=cut.min_p,
                max_tokens=request.max_tokens,
                # 63 bits of it: to vLLM -1 means no seed.
                seed=self._seed(request) & SEED_BITS,
                stop_token_ids=sorted(request.stop_ids),
                logprobs=0 if target is None else 1,
                logprob_token_ids=None if target is None else [target],
                skip_reading_prefix_cache=not self.reads_prefixes,
                extra_args={OWN_TOKENS: request.prefix_length} if self._has_drafts else None,
                ignore_eos=True,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                # Nothing else holds this object: vLLM needs no deep copy, a third of the time of a request here.
                skip_clone=True,
            )
            self._ask(self._llm.add_request, f"{number}", tokens_input(list(request.tokens)), parameters)

    def _seed(self, request: Request) -> int:
        """vLLM's generators begin anew with every request, and would draw for a turn what they drew before."""
        if self._is_aligned or not request.prefix_length:
            return request.seed
        turn = f"turn/{request.seed}/{request.prefix_length}"
        return int.from_bytes(hashlib.sha256(turn.encode()).digest()[:8], "big")

    def _outputs(self) -> list[tuple[int, Output]]:
        return [(int(output.request_id), _output(output)) for output in self._ask(self._llm.step)]

    def _end(self, running: Sequence[int]) -> None:
        if running:
            with suppress(EngineLost):
                self._ask(self._llm.abort_request, [f"{number}" for number in running])


def _output(output: Any) -> Output:
    (sequence,) = output.outputs
    tokens = list(sequence.token_ids)
    logprobs = sequence.logprobs
    assert isinstance(logprobs, FlatLogprobs), "flat log-probs were asked for"
    values = list(logprobs.logprobs)
    ids = list(logprobs.token_ids)
    # The sampled token comes first, then a target that was asked for.
    target = (ids[1], values[1]) if len(ids) > len(tokens) else None
    assert target is not None or ids == tokens, "the log-probs are not those of the tokens"
    return Output(tokens, values[: len(tokens)], sequence.finish_reason, target, sequence.routed_experts)


def _check_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if int(getattr(vllm.envs, name)) != int(value):
            raise UserError(f"{name} must be {value} before vLLM is imported, it is {getattr(vllm.envs, name)}")
