"""SGLang as a rollout engine, in processes of its own (`host`)."""

import atexit
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import EngineLost
from fp8core.models.architecture import Architecture
from fp8core.numerics.truncation import Truncation
from fp8core.processes.variables import check_variables
from fp8core.rollout.requirements import EngineBuild
from fp8core.rollout.resident import SEED_BITS, Output, Request, ResidentEngine
from fp8core.rollout.sglang.host import ADD, CLOSE, ERROR, FINISHED, STOP, serve
from fp8core.rollout.sglang.settings import (
    WORKER,
    described_formats,
    engine_arguments,
    executed_points,
    model_config,
    required_environment,
)
from fp8core.rollout.shared_weights import TensorSpec
from fp8core.rollout.slots import EngineUpdateError, Share, find_shares

# SGLang has greedy requests at temperature 0 alone; what is lower divides by nearly nothing.
_LOWEST_TEMPERATURE = 1e-4
# For SGLang to end its processes; then they are killed with the one between.
_SHUTDOWN_SECONDS = 70.0
# Longest step of a session in which nothing ends.
_STEP_SECONDS = 0.01
# Ends the thread that sends.
_LAST = memoryview(b"")
_DROPPED_BYTES = 1 << 20
_SLEEPING = ["kv_cache", "weights", "cuda_graph"]
_WAKE_TAGS = {"weights": ["weights", "cuda_graph"], "kv_cache": ["kv_cache"]}


class SglangEngine(ResidentEngine):
    product = "SGLang"

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        options: SglangConfig,
        max_batch: int,
        build: EngineBuild,
        worker: str = WORKER,
    ) -> None:
        """Raises UserError: its environment is not prepared; EngineLost: it ended while it started."""
        check_variables(required_environment(), "SGLang is started")
        longest = options.context_length or arch.max_positions
        super().__init__(arch, contract, lowest=_LOWEST_TEMPERATURE, sleeps=options.sleep, routes=False)
        self._build = build
        self._graphs = options.graphs
        self._folder = tempfile.TemporaryDirectory(prefix="fp8-grpo-")
        Path(self._folder.name, "config.json").write_text(
            json.dumps(model_config(arch, contract, options)), encoding="utf-8"
        )
        arguments = engine_arguments(arch, contract, options, self._folder.name, longest, max_batch, worker)
        self._is_closed = False
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # SGLang starts processes of its own, which a daemon may not.
        process = context.Process(target=serve, args=(theirs, arguments), name="sglang", daemon=False)
        process.start()
        # The pipe ends with its last holder.
        theirs.close()
        pipe, self._process = ours, process
        self._host = HostPipe(pipe)
        # Before `multiprocessing` waits for its children, as it does when Python ends.
        atexit.register(self.close)
        self._host.answer()
        self._read_parameters()

    def _description(self, description: Mapping[str, Any]) -> dict[str, object]:
        return {
            "engine": "sglang",
            "version": self._build.label,
            **described_formats(description, self._contract, self._arch.num_layers),
            "rounding_points": executed_points(description),
            "graphs": self._graphs,
        }

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        self._host.close(deadline)
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            # SGLang's processes follow it.
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def ask_policies(self, method: str, *arguments: Any) -> list[Any]:
        return [self._host.call("ask_worker", method, arguments)]

    def drop_prefixes(self) -> bool:
        return bool(self._host.call("flush_cache"))

    def _find_shares(self, specs: Mapping[str, TensorSpec]) -> list[Share]:
        return find_shares(specs, {}, self._parameters)

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self._host.call("resume", _WAKE_TAGS[part])

    def _fall_asleep(self) -> None:
        # Only an engine that runs nothing may be paused.
        if not self.drop_prefixes():
            raise EngineUpdateError("SGLang kept its prefix cache: requests are still running")
        self._host.call("release", _SLEEPING)

    def _begin(self, temperature: float, truncation: Truncation | None) -> None:
        self._host.send("session")

    def _submit(self, requests: Mapping[int, Request]) -> None:
        self._host.send(ADD, [(number, _request(request)) for number, request in requests.items()])

    def _outputs(self) -> list[tuple[int, Output]]:
        outputs = list[tuple[int, Output]]()
        while self._host.comes(0 if outputs else _STEP_SECONDS):
            _, number, output = self._host.receive()
            assert output.pop("ids") == output["tokens"], "the log-probs are not those of the tokens"
            outputs.append((number, Output(**output)))
        return outputs

    def _end(self, running: Sequence[int]) -> None:
        # The call that found the loss of the host has raised it.
        with suppress(EngineLost):
            self._host.send(STOP)
            self._host.answer()


class HostPipe:
    """Our end of the pipe to SGLang's host; raises EngineLost where that has ended.

    A thread sends: the host reads nothing while it sends, so that two full buffers would block both ends.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._unsent = SimpleQueue[memoryview]()
        self._sender = threading.Thread(target=_send_all, args=(pipe, self._unsent), name="to-sglang", daemon=True)
        self._sender.start()

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.answer()

    def send(self, *message: Any) -> None:
        """Where the host has ended, a later `send` or `receive` raises EngineLost."""
        if not self._sender.is_alive():
            raise EngineLost("SGLang's host ended")
        self._unsent.put(ForkingPickler.dumps(message))

    def comes(self, seconds: float) -> bool:
        return self._pipe.poll(seconds)

    def receive(self) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineLost("SGLang's host ended") from error
        if message[0] == ERROR:
            raise RuntimeError(message[1])
        return message

    def answer(self) -> Any:
        """Outputs of requests before the answer are dropped."""
        while (message := self.receive())[0] == FINISHED:
            pass
        return message[1]

    def close(self, deadline: float) -> None:
        """Drop what the host may be blocked in sending until it ends or the deadline passes."""
        with suppress(EngineLost):
            self.send(CLOSE)
        self._unsent.put(_LAST)
        with suppress(OSError):
            # Bytes, not messages: one of them may be read in part.
            while (seconds := deadline - time.monotonic()) > 0 and wait([self._pipe], seconds):
                if not os.read(self._pipe.fileno(), _DROPPED_BYTES):
                    break


def _send_all(pipe: Connection, messages: SimpleQueue[memoryview]) -> None:
    # The end of the host is raised where our end of the pipe is read.
    with suppress(OSError):
        for message in iter(messages.get, _LAST):
            pipe.send_bytes(message)


def _request(request: Request) -> dict[str, Any]:
    # 63 bits of it: SGLang holds seeds as signed integers, and hashes them without a sign.
    seed = request.seed & SEED_BITS
    target = request.target
    own: dict[str, Any] = {"seed": seed, "temperature": request.temperature}
    if target is not None:
        own["target"] = target
    if request.truncation is not None:
        own["truncation"] = vars(request.truncation)
    sampling = {
        "temperature": request.temperature,
        "max_new_tokens": request.max_tokens,
        "stop_token_ids": sorted(request.stop_ids),
        "no_stop_trim": True,
        "sampling_seed": seed,
        "custom_params": own,
    }
    return {"tokens": list(request.tokens), "sampling": sampling, "target": None if target is None else [target]}
