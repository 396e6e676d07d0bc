"""A process between training and SGLang, which holds `sglang.Engine` and answers through a pipe.

SGLang sets the way in which processes are started, catches their signals, and ends every child when it closes or fails.
So it has a process with nothing else in it.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from fp8core.processes import end_with_parent
from fp8core.rollout.sglang.settings import SPARE
from fp8core.rollout.sglang.worker import Mailbox, WorkerError, register, run_detokenizer, run_scheduler

RESULT = "result"
ERROR = "error"
FINISHED = "finished"
CLOSE = "close"
STOP = "stop"
ADD = "add"
# For the end of the last batch to arrive, and for the cache to be dropped.
_FLUSH_SECONDS = 30.0
# Until a message is seen while no request ends.
_POLL_SECONDS = 0.01
# The number of each request by the task that waits for it, and tasks that have ended.
Running = dict["asyncio.Task[dict[str, Any]]", int]
ProcessExit = asyncio.Queue["asyncio.Task[dict[str, Any]]"]


def start_engine(arguments: dict[str, Any]) -> Any:
    # SGLang is optional; its package has a stand-in of this name, which cannot be derived from.
    from sglang.srt.entrypoints.engine import Engine

    from fp8core.rollout.sglang.sampler import BringsSeed

    register()

    class PolicyEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)
        policy_processor: str = BringsSeed.to_str()

    return PolicyEngine(**arguments)


def serve(pipe: Connection, arguments: dict[str, Any], start: Callable[[dict[str, Any]], Any] = start_engine) -> None:
    """Until CLOSE is asked for, the parent ends, or one of SGLang's processes."""
    end_with_parent.follow_parent()
    try:
        host = Host(pipe, start(arguments), arguments)
    except BaseException:
        # SGLang leaves what it has started, and `multiprocessing` would wait for it before the reason is printed.
        for process in multiprocessing.active_children():
            process.kill()
        raise
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


def _end_with_children(closing: threading.Event) -> None:
    """From now on the end of a child is that of this process, unless it is closing: a call may wait for its answer."""
    children = [process.sentinel for process in multiprocessing.active_children()]

    def follow() -> None:
        wait(children)
        if not closing.is_set():
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="children", daemon=True).start()


class Host:
    def __init__(self, pipe: Connection, engine: Any, arguments: dict[str, Any]) -> None:
        self._pipe = pipe
        self._engine = engine
        self._mailbox = Mailbox(arguments["model_path"])
        (self._worker,) = arguments["custom_weight_loader"]
        # Requests that SGLang has at once.
        self._places = asyncio.Semaphore(arguments["max_running_requests"] - SPARE)
        self._aborting = False

    def answer(self, method: str, *arguments: Any) -> bool:
        """False for CLOSE."""
        if method == CLOSE:
            return False
        try:
            result = getattr(self, method)(*arguments)
        except WorkerError as error:
            self._pipe.send((ERROR, str(error)))
        else:
            self._pipe.send((RESULT, result))
        return True

    def ask_worker(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._mailbox.ask(method, arguments)
        has_result, message = self._engine.update_weights_from_tensor([], load_format=self._worker, flush_cache=False)
        assert has_result, message
        return self._mailbox.answered()

    def flush_cache(self) -> bool:
        result = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.flush_cache(timeout_s=_FLUSH_SECONDS)
        )
        return bool(result.success)

    def release(self, kinds: list[str]) -> None:
        self._engine.release_memory_occupation(kinds)

    def resume(self, kinds: list[str]) -> None:
        self._engine.resume_memory_occupation(kinds)

    def session(self) -> None:
        """Take (ADD, numbered requests) while others run, and send (FINISHED, number, output) of each, until STOP.
        Raises EOFError: CLOSE came."""
        self._engine.loop.run_until_complete(self._session())

    def close(self) -> None:
        self._engine.shutdown()

    async def _session(self) -> None:
        loop = asyncio.get_running_loop()
        running = Running()
        process_end = ProcessExit()
        try:
            while True:
                # The loop does not watch the pipe. SGLang brings uvloop, which would make it non-blocking: what is
                # sent while the parent is behind would fail.
                while self._pipe.poll():
                    kind, *requests = self._pipe.recv()
                    if kind == CLOSE:
                        raise EOFError("closed while requests were running")
                    if kind == STOP:
                        return
                    for number, request in requests[0]:
                        task = loop.create_task(self._one(request))
                        running[task] = number
                        task.add_done_callback(process_end.put_nowait)
                await self._pass_on(running, process_end)
        finally:
            await self._abort(running)

    async def _pass_on(self, running: Running, process_end: ProcessExit) -> None:
        try:
            tasks = [await asyncio.wait_for(process_end.get(), _POLL_SECONDS)]
        except TimeoutError:
            return
        while not process_end.empty():
            tasks.append(process_end.get_nowait())
        for task in tasks:
            self._pipe.send((FINISHED, running.pop(task), task.result()))

    async def _abort(self, running: Running) -> None:
        self._aborting = True
        pending = set(running)
        while pending:
            # Again and again: it ends what has reached SGLang's scheduler, and some may be on their way.
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            ended, pending = await asyncio.wait(pending, timeout=_POLL_SECONDS)
            for task in ended:
                task.exception()  # SGLang raises in those that had not reached its scheduler. No one reads it.
        self._aborting = False

    async def _one(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._places:
            if self._aborting:
                return {}  # No one reads it.
            output = await self._engine.async_generate(
                input_ids=request["tokens"],
                sampling_params=request["sampling"],
                token_ids_logprob=request["target"],
                custom_logit_processor=self._engine.policy_processor,
                return_logprob=True,
                # The prompt's log-probs would be computed anew where it is cached.
                logprob_start_len=-1,
            )
        about = output["meta_info"]
        logprobs = about["output_token_logprobs"]
        targets = about.get("output_token_ids_logprobs") or []
        return {
            "ids": list(output["output_ids"]),
            "tokens": [token for _, token, *_ in logprobs],
            "logprobs": [logprob for logprob, *_ in logprobs],
            "target": next(((token, logprob) for position in targets for logprob, token, *_ in position), None),
            "reason": about["finish_reason"]["type"],
        }
