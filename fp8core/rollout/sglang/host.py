"""A process between training and SGLang, which holds `sglang.Engine` and answers through a pipe.

SGLang takes a process for its own. It sets the way in which others are started, and catches their signals. When it
closes, or a process of it fails, it ends every child of this one. So it has a process with nothing else in it.
"""

import asyncio
import base64
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from fp8core.processes import end_with_parent
from fp8core.rollout.sglang.settings import SPARE
from fp8core.rollout.sglang.worker import Mailbox, WorkerError, register, run_detokenizer, run_scheduler

RESULT, ERROR, FINISHED = "result", "error", "finished"
CLOSE, STOP, ADD = "close", "stop", "add"
_RESOLVED = (
    *("attention_backend", "sampling_backend", "kv_cache_dtype", "page_size", "max_running_requests"),
    # As it was asked for: what SGLang makes of free memory differs between engines, and between starts.
    "max_total_tokens",
    *("chunked_prefill_size", "enable_deterministic_inference", "disable_radix_cache", "context_length"),
)
# For the end of the last batch to arrive, and for the cache to be dropped.
_FLUSH_SECONDS = 30.0
# Until a message is seen while no request ends.
_POLL_SECONDS = 0.01
# Groups by the task that waits for their requests.
Running = dict["asyncio.Task[list[dict[str, Any]]]", int]


def start_engine(arguments: dict[str, Any]) -> Any:
    """SGLang's engine with our processes, in the places that it keeps for them."""
    # SGLang is optional; its package has a stand-in of this name, which cannot be derived from.
    from sglang.srt.entrypoints.engine import Engine

    register()

    class PolicyEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    return PolicyEngine(**arguments)


def serve(pipe: Connection, arguments: dict[str, Any], start: Callable[[dict[str, Any]], Any] = start_engine) -> None:
    """`start` an engine, say so, and answer until CLOSE is asked for, the parent ends, or one of SGLang's processes."""
    end_with_parent.follow_parent()
    host = Host(pipe, _started_whole(start, arguments), arguments)
    closing = threading.Event()
    try:
        _end_with_children(closing)
        pipe.send((RESULT, None))
        with suppress(EOFError):
            while host.answer(*pipe.recv()):
                pass
    finally:
        # Where this process fails, `multiprocessing` prints the reason after its children have ended, which run on.
        closing.set()
        host.close()


def _started_whole(start: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
    try:
        return start(arguments)
    except BaseException:
        # SGLang leaves what it has started, and `multiprocessing` would wait for it before the reason is printed.
        for process in multiprocessing.active_children():
            process.kill()
        raise


def _end_with_children(closing: threading.Event) -> None:
    """From now on the end of a child is that of this process, unless it is closing.

    A call may wait for an answer that the child owes, so the end is SIGKILL: SGLang's other processes follow this one.
    """
    children = [process.sentinel for process in multiprocessing.active_children()]

    def follow() -> None:
        wait(children)
        if not closing.is_set():
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="children", daemon=True).start()


class Host:
    def __init__(self, pipe: Connection, engine: Any, arguments: dict[str, Any]) -> None:
        self._pipe, self._engine = pipe, engine
        self._mailbox = Mailbox(arguments["model_path"])
        (self._worker,) = arguments["custom_weight_loader"]
        self._seeded = bool(arguments.get("enable_custom_logit_processor"))
        # Requests that SGLang has at once.
        self._places = asyncio.Semaphore(arguments["max_running_requests"] - SPARE)
        self._aborting = False

    def answer(self, method: str, *arguments: Any) -> bool:
        """Call a method and send what it returns or how it failed; false for CLOSE."""
        if method in (CLOSE, STOP):
            # A generation that is to stop may have ended by itself.
            return method == STOP
        try:
            result = getattr(self, method)(*arguments)
        except WorkerError as error:
            self._pipe.send((ERROR, str(error)))
        else:
            self._pipe.send((RESULT, result))
        return True

    def ask_worker(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._mailbox.ask(method, arguments)
        done, message = self._engine.update_weights_from_tensor([], load_format=self._worker, flush_cache=False)
        assert done, message
        return self._mailbox.answered()

    def flush_cache(self) -> bool:
        """Forget all cached prompts; false while requests are running."""
        flushed = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.flush_cache(timeout_s=_FLUSH_SECONDS)
        )
        return bool(flushed.success)

    def release(self, kinds: list[str]) -> None:
        """Give memory back: `weights`, `kv_cache`, `cuda_graph`."""
        self._engine.release_memory_occupation(kinds)

    def resume(self, kinds: list[str]) -> None:
        """Take memory again."""
        self._engine.resume_memory_occupation(kinds)

    def resolved(self) -> dict[str, Any]:
        settings = self._engine.server_args
        return {name: getattr(settings, name) for name in _RESOLVED} | {"graphs": str(settings.cuda_graph_config)}

    def generate(self, groups: Sequence[tuple[int, list[dict[str, Any]]]]) -> None:
        """Generate all requests at once; sends (FINISHED, group, outputs) for each group. STOP ends what is running.
        Raises EOFError: CLOSE came, as also in a `session`."""
        self._engine.loop.run_until_complete(self._generate(groups))

    def session(self) -> None:
        """Take (ADD, groups) while others run, and send each as `generate` does, until STOP ends what is running."""
        self._engine.loop.run_until_complete(self._session())

    def close(self) -> None:
        self._engine.shutdown()

    async def _generate(self, groups: Sequence[tuple[int, list[dict[str, Any]]]]) -> None:
        running, stopped = self._started(groups), False
        try:
            # The loop does not watch the pipe. SGLang brings uvloop, which would make it non-blocking: what is sent
            # while the parent is behind would fail.
            while running and not (stopped := self._pipe.poll()):
                await self._pass_on(running)
        finally:
            await self._abort(running)
        if stopped:
            _check_open(self._pipe.recv()[0])

    async def _session(self) -> None:
        running: Running = {}
        try:
            while True:
                while self._pipe.poll():
                    kind, *groups = self._pipe.recv()
                    _check_open(kind)
                    if kind == STOP:
                        return
                    running |= self._started(*groups)
                await self._pass_on(running)
        finally:
            await self._abort(running)

    def _started(self, groups: Sequence[tuple[int, list[dict[str, Any]]]]) -> Running:
        loop = asyncio.get_running_loop()
        return {loop.create_task(self._group(requests)): group for group, requests in groups}

    async def _pass_on(self, running: Running) -> None:
        if not running:
            await asyncio.sleep(_POLL_SECONDS)
            return
        done, _ = await asyncio.wait(running, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            self._pipe.send((FINISHED, running.pop(task), task.result()))

    async def _abort(self, running: Running) -> None:
        self._aborting, left = True, set(running)
        while left:
            # Again and again: it ends what has reached SGLang's scheduler, and some may be on their way.
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            _, left = await asyncio.wait(left, timeout=_POLL_SECONDS)
        self._aborting = False

    async def _group(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Outputs of one group: ids, log-probs, reason and, where asked for, experts of each request."""
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._places:
            if self._aborting:
                return {}  # No one reads it.
            output = await self._engine.async_generate(
                input_ids=request["tokens"],
                sampling_params=request["sampling"],
                token_ids_logprob=request.get("target"),
                custom_logit_processor=_processor() if self._seeded else None,
                return_logprob=True,
                return_routed_experts=request.get("routes", False),
                # Of the prompt none are wanted: they would be computed anew where it is cached.
                logprob_start_len=-1,
            )
        return _output(output)


def _check_open(kind: str) -> None:
    """For CLOSE in the middle of a generation, raise what the end of the parent does."""
    if kind == CLOSE:
        raise EOFError("closed while requests were running")


def _processor() -> str:
    from fp8core.rollout.sglang.sampler import BringsSeed

    processor: str = BringsSeed.to_str()
    return processor


def _output(output: dict[str, Any]) -> dict[str, Any]:
    about = output["meta_info"]
    logprobs = about["output_token_logprobs"]
    targets, routes = about.get("output_token_ids_logprobs") or [], about.get("routed_experts")
    return {
        "ids": list(output["output_ids"]),
        "tokens": [token for _, token, *_ in logprobs],
        "logprobs": [logprob for logprob, *_ in logprobs],
        "targets": [(token, logprob) for position in targets for logprob, token, *_ in position],
        "reason": about["finish_reason"]["type"],
        # int32 [positions, layers, k].
        "routes": None if routes is None else base64.b64decode(routes),
    }
