"""SGLang as a rollout engine, in processes of its own (`host`).

The engine starts without weights; the first update brings them. Weights are written in place and read back, so that
what generates is proved to be what was sent (`tasks.sync`).
"""

import atexit
import json
import math
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from fp8core.config.engines import SglangConfig
from fp8core.config.precision import PrecisionContract
from fp8core.errors import EngineLost
from fp8core.models.architecture import Architecture
from fp8core.processes.variables import refuse_others
from fp8core.rollout.engine import Completion, Probe, PromptGroup, Sampling, finish_of
from fp8core.rollout.requirements import EngineBuild, temperature_refusals
from fp8core.rollout.resident import SEED_BITS, ResidentEngine, ending, kernels_by_type
from fp8core.rollout.sglang.host import ADD, CLOSE, ERROR, FINISHED, STOP, serve
from fp8core.rollout.sglang.requirements import LOWEST_TEMPERATURE
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

# For SGLang to end its processes; then they are killed with the one between.
_SHUTDOWN_SECONDS = 70.0
# Longest step of a session in which nothing ends.
_STEP_SECONDS = 0.01
# Ends the thread that sends.
_LAST = memoryview(b"")
_DROPPED_BYTES = 1 << 20
_SLEEPING = ["kv_cache", "weights", "cuda_graph"]
_WOKEN = {"weights": ["weights", "cuda_graph"], "kv_cache": ["kv_cache"]}


class SglangEngine(ResidentEngine):
    product = "SGLang"
    length_setting = "rollout.sglang.context_length"

    def __init__(
        self,
        arch: Architecture,
        contract: PrecisionContract,
        options: SglangConfig,
        max_batch: int,
        build: EngineBuild,
        worker: str = WORKER,
    ) -> None:
        """Start SGLang. Raises UserError: its environment is not prepared, or it lacks parts that we use."""
        refuse_others(required_environment(), "SGLang is started")
        longest = options.context_length or arch.max_positions
        super().__init__(arch, contract, longest=longest, sleeps=options.sleep, routes=False)
        self._build, self._graphs = build, options.graphs
        self._folder = tempfile.TemporaryDirectory(prefix="fp8-grpo-")
        Path(self._folder.name, "config.json").write_text(
            json.dumps(model_config(arch, contract, options)), encoding="utf-8"
        )
        arguments = engine_arguments(arch, contract, options, self._folder.name, longest, max_batch, worker)
        self._closed = False
        pipe, self._process = _start_host(arguments)
        self._host = HostPipe(pipe)
        # Before `multiprocessing` waits for its children, as it does when Python ends.
        atexit.register(self.close)
        self._host.answer()
        self._read_parameters()

    def _described(self, described: Mapping[str, Any]) -> dict[str, object]:
        return {
            "engine": "sglang",
            "version": self._build.described,
            **described_formats(described, self._contract, self._arch.num_layers),
            "rounding_points": executed_points(described),
            "kernels": kernels_by_type(described["linears"]),
            "graphs": self._graphs,
        }

    def open_session(self, sampling: Sampling) -> "SglangSession":
        self._prepare(sampling)
        return SglangSession(self._host, sampling, self._check_lengths)

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        """Log-prob of each target after its context, with one sampled token a probe; one row."""
        assert self._complete, "update() comes before score(), also after sleep()"
        found = [math.nan] * len(probes)
        with closing(RequestStream(self._host)) as stream:
            stream.add(enumerate(_probe_request(probe, temperature) for probe in probes))
            for _ in probes:
                place, output = stream.next_output()
                ((token, found[place]),) = output["targets"]
                assert token == probes[place].target, "the log-prob is not that of the target"
        return [found]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        self._host.close(deadline)
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            # SGLang's processes follow it.
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def await_loss(self) -> str | None:
        """Wait for the end of SGLang's host: how it ended, None after `close`. It ends with any process of SGLang."""
        wait([self._process.sentinel])
        self._process.join()
        return None if self._closed else f"SGLang's host {_ending(self._process.exitcode)}"

    def ask_policies(self, method: str, *arguments: Any) -> list[Any]:
        return [self._host.call("ask_worker", method, arguments)]

    def drop_prefixes(self) -> bool:
        return bool(self._host.call("flush_cache"))

    def _find_shares(self, sent: Mapping[str, TensorSpec]) -> list[Share]:
        return find_shares(sent, {}, self._parameters)

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self._host.call("resume", _WOKEN[part])

    def _fall_asleep(self) -> None:
        # Only an engine that runs nothing may be paused.
        if not self.drop_prefixes():
            raise EngineUpdateError("SGLang kept its prefix cache: requests are still running")
        self._host.call("release", _SLEEPING)

    def _temperature_refusals(self, temperature: float) -> Iterator[str]:
        return temperature_refusals(temperature, LOWEST_TEMPERATURE, "SGLang")


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
        """Ask for something, and go on. Where the host has ended, a later `send` or `receive` raises EngineLost."""
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
        """The result of what was asked for; outputs of requests before it are dropped."""
        while (message := self.receive())[0] == FINISHED:
            pass
        return message[1]

    def close(self, deadline: float) -> None:
        """Ask for the end, and drop what the host may be blocked in sending until it ends or the deadline passes."""
        with suppress(EngineLost):
            self.send(CLOSE)
        self._unsent.put(_LAST)
        with suppress(OSError):
            # Bytes, not messages: one of them may be read in part.
            while (left := deadline - time.monotonic()) > 0 and wait([self._pipe], left):
                if not os.read(self._pipe.fileno(), _DROPPED_BYTES):
                    break


class RequestStream:
    def __init__(self, host: HostPipe) -> None:
        self._host = host
        host.send("session")

    def add(self, requests: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self._host.send(ADD, [*requests])

    def next_output(self) -> tuple[int, dict[str, Any]]:
        _, number, output = self._host.receive()
        return number, output

    def close(self) -> None:
        with suppress(EngineLost):
            self._host.send(STOP)
            self._host.answer()


class SglangSession:
    """Completions in progress. One that goes on after what was begun draws by its place in the sequence."""

    def __init__(
        self, host: HostPipe, sampling: Sampling, check: Callable[[Sequence[PromptGroup], Sampling], None]
    ) -> None:
        self._host, self._sampling, self._check = host, sampling, check
        self._requests: dict[int, tuple[PromptGroup, int]] = {}
        self._numbers = count()
        self._stream = RequestStream(host)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        self._check(groups, self._sampling)
        new = {next(self._numbers): (group, i) for group in groups for i in range(len(group.seeds))}
        self._requests |= new
        self._stream.add((number, _sample_request(*asked, self._sampling)) for number, asked in new.items())

    def step(self) -> list[Completion]:
        found = list[Completion]()
        while self._requests and self._host.comes(0 if found else _STEP_SECONDS):
            number, output = self._stream.next_output()
            found.append(_completion(output, *self._requests.pop(number), self._sampling))
        return found

    def close(self) -> None:
        self._requests = {}
        self._stream.close()


def _start_host(arguments: dict[str, Any]) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # SGLang starts processes of its own, which a daemon may not.
    process = context.Process(target=serve, args=(theirs, arguments), name="sglang", daemon=False)
    process.start()
    # The pipe ends with its last holder.
    theirs.close()
    return ours, process


def _send_all(pipe: Connection, messages: SimpleQueue[memoryview]) -> None:
    # The end of the host is raised where our end of the pipe is read.
    with suppress(OSError):
        for message in iter(messages.get, _LAST):
            pipe.send_bytes(message)


def _ending(code: int | None) -> str:
    return ending(code) + (", as where one of SGLang's processes failed" if code is not None and code < 0 else "")


def _sample_request(group: PromptGroup, i: int, sampling: Sampling) -> dict[str, Any]:
    # 63 bits of it: SGLang holds seeds as signed integers, and hashes them without a sign.
    seed, wanted = group.seeds[i] & SEED_BITS, group.room_of(i, sampling.max_new_tokens)
    return {
        "tokens": [*group.context(i)],
        "sampling": _sampling(sampling.temperature, wanted, seed, sorted(sampling.stop_ids)),
    }


def _probe_request(probe: Probe, temperature: float) -> dict[str, Any]:
    sampling = _sampling(temperature, 1, 0, [])
    sampling["custom_params"]["target"] = probe.target
    return {"tokens": list(probe.context), "sampling": sampling, "target": [probe.target]}


def _sampling(temperature: float, tokens: int, seed: int, stops: list[int]) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "max_new_tokens": tokens,
        "stop_token_ids": stops,
        "no_stop_trim": True,
        "sampling_seed": seed,
        "custom_params": {"seed": seed, "temperature": temperature},
    }


def _completion(output: Mapping[str, Any], group: PromptGroup, i: int, sampling: Sampling) -> Completion:
    tokens, reason = output["tokens"], output["reason"]
    assert output["ids"] == tokens, "the log-probs are not those of the tokens"
    if reason == "abort":
        raise EngineLost("SGLang ends, as a signal asked it to")
    assert reason in ("stop", "length"), f"SGLang ended a request with {reason}"
    # SGLang's reason of a last token that is both, the last of all and a stop, is the length.
    finish = finish_of(tokens, len(group.begun_of(i)), sampling)
    return Completion(group.group, group.samples[i], tokens, output["logprobs"], finish)
