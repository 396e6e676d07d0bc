"""Stand-ins for `sglang.Engine` with a process of their own, as SGLang's scheduler is, for tests of its host.

The process is started by spawn and imports this module by its name: nothing here imports torch.
"""

import asyncio
import multiprocessing
import time
from typing import Any

import uvloop

from fp8core.processes import end_with_parent

TOKENS = 20_000
_spawning = multiprocessing.get_context("spawn")


class HostedEngine:
    """Answers at once with more tokens than a pipe holds; while memory is given back, its process ends."""

    policy_processor = ""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.tokenizer_manager = self
        self._scheduler = started_scheduler()

    async def async_generate(self, input_ids: list[int], **_: Any) -> dict[str, Any]:
        """Output of a request."""
        about = {"output_token_logprobs": [(-1.0, 7, None)] * TOKENS, "finish_reason": {"type": "length"}}
        return {"output_ids": [7] * TOKENS, "meta_info": about}

    def abort_request(self, abort_all: bool) -> None:
        """Nothing runs on."""

    def release_memory_occupation(self, kinds: list[str]) -> None:
        """Wait for an answer of a process that has ended."""
        self._scheduler.terminate()
        self.loop.run_until_complete(asyncio.Event().wait())

    def shutdown(self) -> None:
        self._scheduler.kill()
        self._scheduler.join()


def started_scheduler() -> Any:
    """A process that ends with its parent, and is no daemon."""
    process = _spawning.Process(target=_run, name="scheduler")
    process.start()
    return process


def start(arguments: dict[str, Any]) -> HostedEngine:
    """In place of `host.start_engine`."""
    return HostedEngine()


def _run() -> None:
    end_with_parent.follow_parent()
    time.sleep(600)
