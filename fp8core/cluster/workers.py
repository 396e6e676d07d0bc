"""Engines and trainers of a run on a cluster, as the run sees them: one engine and one trainer, however many there are.

Weights go from rank 0 to all engines at once, and every engine's read-back is compared.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import ray

from fp8core.cluster.member import HostProcess
from fp8core.cluster.parts import EnginePart, PolicyExport, TrainerPart, build_sft
from fp8core.cluster.transport import BROADCASTS, Broadcast, GroupRanks, Link, Rendezvous
from fp8core.cluster.worker_group import Call, Handle, WorkerGroup
from fp8core.config.capability import Environment
from fp8core.config.run import RunConfig
from fp8core.errors import MemberLost, UserError
from fp8core.models.architecture import Architecture
from fp8core.models.safetensors_files import TensorSource
from fp8core.models.tokenizer import Tokenizer
from fp8core.models.weights import EngineWeights
from fp8core.numerics.fingerprint import digest_of
from fp8core.numerics.kv_scales import KvStatistics, LayerScales
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.rl.user_loss import shared_loss
from fp8core.rollout.engine import Completion, PolicyScales, Probe, PromptGroup, Sampling, Session, SyncReport
from fp8core.rollout.registry import engine_entry
from fp8core.rollout.shared_weights import TensorSpec
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.training.trainer import ScoredBatch, TrainReport

# Calls that wait in an engine while we store what it finished, so that it does not wait for us.
_AHEAD = 2


class ReplicaError(RuntimeError):
    """Engines or ranks that should hold the same do not; the message names two of them."""


Value = TypeVar("Value")


def common_value(members: Sequence[Handle], what: str, values: Sequence[Value]) -> Value:
    for member, value in zip(members, values, strict=True):
        if value != values[0]:
            raise ReplicaError(f"{member.name} and {members[0].name} hold {what}: {value} and {values[0]}")
    return values[0]


class RemoteWeights(dict[str, TensorSpec]):
    """Layouts of weights that wait in ranks of a trainer; `on_gpu`: ranks that have all of them on their GPU."""

    def __init__(self, exports: Sequence[PolicyExport | None], key: str) -> None:
        first = exports[0]
        assert first is not None, "rank 0 has the whole policy"
        super().__init__(first.layouts)
        self.key = key
        self._digest = first.digest
        self.on_gpu = [rank for rank, each in enumerate(exports) if each is not None and each.on_gpu]

    def digest(self) -> str:
        return self._digest


class Route(NamedTuple):
    """The way of one engine's weights: from a rank, by `memory` of that rank's GPU or a broadcast."""

    engine: int
    rank: int
    path: Literal["memory"] | Broadcast


def find_routes(
    ranks: Sequence[HostProcess], engines: Sequence[HostProcess], holders: Sequence[int], colocated: bool
) -> list[Route]:
    """A route for each engine; `holders`: ranks with the whole policy on their GPU, none in main memory."""

    def route(index: int, engine: HostProcess) -> Route:
        if not holders or engine.gpu is None:
            return Route(index, 0, "gloo")
        for rank in holders:
            if (ranks[rank].address, ranks[rank].gpu) == (engine.address, engine.gpu):
                return Route(index, rank, "memory")
        on_host = colocated and engine.address == ranks[0].address
        return Route(index, 0, "memory" if on_host else "nccl")

    return [route(index, engine) for index, engine in enumerate(engines)]


class Cluster:
    def __init__(self, config: RunConfig, wants_gpus: bool, environment: Environment) -> None:
        shared = engine_entry(config).tensor_parallel(config)
        self._arguments = config.cluster, shared, wants_gpus, environment, config.threads
        self._keys = count()
        self._open()

    def replace(self) -> None:
        """Raises MemberLost: its processes do not start, or cannot find each other; the caller may try once more."""
        self.workers.close()
        try:
            self._open(self.workers.unit)
        except UserError as error:
            raise MemberLost(str(error)) from error

    def build_engine(self, config: RunConfig, arch: Architecture) -> "ReplicatedEngine":
        key = self._build(self.workers.engines, EnginePart, (), config, arch)
        return ReplicatedEngine(self.workers, key, self._store, config.cluster.placement == "colocated")

    def build_trainer(self, config: RunConfig, arch: Architecture, masters: TensorSource) -> "RankedTrainer":
        config = config.model_copy(update={"loss": shared_loss(config.loss)})
        key = self._build(self.workers.ranks, TrainerPart, ("ranks",), config, arch, masters)
        return RankedTrainer(self.workers, key, arch)

    def build_sft_trainer(self, config: RunConfig, arch: Architecture, initial: TensorSource) -> "RemoteSft":
        config = config.model_copy(update={"loss": shared_loss(config.loss)})
        key = self._build(self.workers.ranks[:1], build_sft, (), config, arch, initial)
        return RemoteSft(self.workers, key)

    def close(self) -> None:
        self.workers.close()

    def _open(self, unit: str | None = None) -> None:
        self.workers = workers = WorkerGroup(*self._arguments, unit)
        try:
            first = workers.ranks[0]
            ranks = workers.ranks
            host = first.place.address
            workers.gather([first.send("build", "meeting", Rendezvous, (), host)])
            (port,) = workers.gather([first.send("call", "meeting", "port")])
            workers.gather(
                [each.send("build", "ranks", GroupRanks, (), host, port, i, len(ranks)) for i, each in enumerate(ranks)]
            )
            self._store = host, port
        except BaseException:
            workers.close()
            raise

    def _build(self, members: Sequence[Handle], part: Callable[..., Any], uses: Sequence[str], *arguments: Any) -> str:
        key = f"{part.__name__} {next(self._keys)}"
        self.workers.call_all(members, "build", key, part, uses, *arguments)
        return key


class ReplicatedEngine:
    """Engines that hold one policy and share its prompts out; satisfies `RolloutEngine`."""

    def __init__(self, workers: WorkerGroup, key: str, store: tuple[str, int], colocated: bool) -> None:
        """`store`: host and port where processes meet."""
        self._workers = workers
        self._key = key
        self._members = workers.engines
        self._store = store
        self._links = set[str]()
        self._colocated = colocated
        self._read_memory = all(workers.gather(self._calls("reads_memory")))

    def update(self, tensors: RemoteWeights, scales: PolicyScales, version: int) -> SyncReport:
        """As `RolloutEngine.update`, in all engines. Raises ReplicaError: they do not hold the same afterwards."""
        layouts = dict(tensors)
        ranks = self._workers.ranks
        try:
            self._workers.gather(self._calls("expect", layouts, scales, version))
            sources, targets = ([member.place for member in each] for each in (ranks, self._members))
            routes = find_routes(sources, targets, tensors.on_gpu if self._read_memory else (), self._colocated)
            reports = self._take(routes, tensors.key, layouts, (scales, version))
        finally:
            if self._workers.alive:
                self._workers.call_all(ranks, "call", tensors.key, "release")
        for part in ("version", "digest", "scales"):
            common_value(self._members, f"another {part}", [getattr(report, part) for report in reports])
        return reports[0]

    def _take(
        self, routes: Sequence[Route], key: str, layouts: dict[str, TensorSpec], policy: tuple[PolicyScales, int]
    ) -> list[SyncReport]:
        ranks = self._workers.ranks
        gather = self._workers.gather
        lenders = sorted({route.rank for route in routes if route.path == "memory"})
        # Engines need the memory of weights that none of them reads.
        senders = {route.rank for route in routes}
        gather([rank.send("call", key, "release") for i, rank in enumerate(ranks) if i not in senders])
        handles = dict(
            zip(lenders, gather([ranks[i].send("call", key, "share_weights") for i in lenders]), strict=True)
        )
        sends = list[Call]()
        takes = dict[int, Call]()
        for engine, rank, path in routes:
            if path == "memory":
                takes[engine] = self._members[engine].send("call", self._key, "read", handles[rank], *policy)
        for path in BROADCASTS:
            if engines := [route.engine for route in routes if route.path == path]:
                link = self._link(path, engines)
                sends.append(ranks[0].send("call_with_part", key, "send", link))
                for i in engines:
                    takes[i] = self._members[i].send("call_with_part", self._key, "receive", link, layouts, *policy)
        reports: list[SyncReport] = gather([*sends, *(takes[i] for i in range(len(self._members)))])
        return reports[len(sends) :]

    def _link(self, path: Broadcast, engines: Sequence[int]) -> str:
        """The name of the group of rank 0 and these engines, which is made when it is first needed."""
        key = f"{self._key} {path} {' '.join(map(str, engines))}"
        if key not in self._links:
            members = [self._workers.ranks[0], *(self._members[index] for index in engines)]
            self._workers.gather(
                [
                    member.send("build", key, Link, (), *self._store, key, path, process, len(members))
                    for process, member in enumerate(members)
                ]
            )
            self._links.add(key)
        return key

    def fingerprint(self) -> str:
        fingerprints: list[str] = self._workers.gather(self._ask("fingerprint"))
        return common_value(self._members, "other weights", fingerprints)

    def describe(self) -> dict[str, object]:
        return common_value(self._members, "other formats", self._workers.gather(self._ask("describe")))

    def generate(self, groups: Sequence[PromptGroup], sampling: Sampling) -> Iterator[list[Completion]]:
        yield from self.open_session(sampling).generate(groups)

    def open_session(self, sampling: Sampling) -> "ReplicatedSession":
        self._workers.gather(self._calls("open_session", sampling))
        return ReplicatedSession(self._workers, self._key)

    def draft_counts(self) -> Counter[str]:
        return sum(self._workers.gather(self._calls("draft_counts")), Counter[str]())

    def score(self, probes: Sequence[Probe], temperature: float) -> list[list[float]]:
        return [row for rows in self._workers.gather(self._ask("score", probes, temperature)) for row in rows]

    def sleep(self) -> None:
        self._workers.gather(self._ask("sleep"))

    def close(self) -> None:
        """The processes end with the cluster, and with them what they hold."""

    def _ask(self, method: str, *arguments: Any) -> list[Call]:
        """A method of the engines themselves."""
        return self._calls("call", method, *arguments)

    def _calls(self, method: str, *arguments: Any) -> list[Call]:
        return [member.send("call", self._key, method, *arguments) for member in self._members]


class ReplicatedSession(Session):
    """Requests in flight in all engines. All of a group are one engine's, whose prefix cache has their last turns."""

    def __init__(self, workers: WorkerGroup, key: str) -> None:
        self._workers = workers
        self._key = key
        self._members = workers.engines
        self._waiting = dict[Any, Handle]()
        self._places = dict[int, int]()
        self._in_flight = [0] * len(workers.engines)

    @property
    def busy(self) -> bool:
        return any(self._in_flight)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        """As `Session.add`; a request that is refused is raised by a later `step`."""
        shares: list[list[PromptGroup]] = [[] for _ in self._members]
        for group in groups:
            i = self._places.setdefault(group.group, self._in_flight.index(min(self._in_flight)))
            shares[i].append(group)
            self._in_flight[i] += len(group.samples)
        for member, share in zip(self._members, shares, strict=True):
            if share:
                self._send(member, "add", share)

    def step(self) -> list[Completion]:
        for member, requests in zip(self._members, self._in_flight, strict=True):
            calls = sum(other is member for other in self._waiting.values())
            for _ in range(calls, _AHEAD if requests else 0):
                self._send(member, "step")
        ended = self._workers.next_result(self._waiting)
        member = self._waiting.pop(ended)
        (finished,) = self._workers.gather([Call(member, ended)])
        completions: list[Completion] = finished or []
        self._in_flight[self._members.index(member)] -= len(completions)
        return completions

    def close(self) -> None:
        if self._workers.alive:
            self._workers.gather([member.send("call", self._key, "close_session") for member in self._members])

    def _send(self, member: Handle, method: str, *arguments: Any) -> None:
        call = member.send("call", self._key, method, *arguments)
        self._waiting[call.ref] = member


class RemoteSft:
    def __init__(self, workers: WorkerGroup, key: str) -> None:
        self._workers = workers
        self._key = key

    def sft_step(self, batch: TokenBatch, learning_rate: float) -> float:
        return cast(float, self._call("sft_step", batch, learning_rate))

    def store_weights(self, store: ArtifactStore) -> Ref:
        return cast(Ref, self._call("store_weights", store))

    def close(self) -> None:
        if self._workers.alive:
            self._workers.gather([self._workers.ranks[0].send("drop", self._key)])

    def _call(self, method: str, *arguments: Any) -> Any:
        (result,) = self._workers.gather([self._workers.ranks[0].send("call", self._key, method, *arguments)])
        return result


class RankedTrainer:
    """One trainer in all ranks, which make the same calls; satisfies `Trainer`. Results are rank 0's."""

    def __init__(self, workers: WorkerGroup, key: str, arch: Architecture) -> None:
        self._workers = workers
        self._key = key
        self.arch = arch
        self._numbers = count()
        self.version = 0
        # With Megatron no rank reads all tensors.
        self.start_digest = digest_of({name: tensor for read in self._by_all("read") for name, tensor in read.items()})

    def logprobs(self, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales]) -> ScoredBatch:
        return cast(ScoredBatch, self._call("logprobs", batch, temperature, scales))

    def statistics(self, batch: TokenBatch) -> KvStatistics:
        return cast(KvStatistics, self._call("statistics", batch))

    def step(self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales]) -> TrainReport:
        return self._common_report(self._by_all("step", batch, temperature, scales))

    def scored_step(
        self, batch: RolloutBatch, temperature: float, scales: Sequence[LayerScales]
    ) -> tuple[TrainReport, ScoredBatch]:
        results = self._by_all("scored_step", batch, temperature, scales)
        return self._common_report([report for report, _ in results]), results[0][1]

    def keep(self, engine_weights: EngineWeights) -> str:
        key = f"{self._key}, kept {next(self._numbers)}"
        self._workers.call_all(self._workers.ranks, "build", key, TrainerPart.exported_policy, (self._key,))
        return key

    def forget(self, key: str) -> None:
        self._workers.call_all(self._workers.ranks, "drop", key)

    def logprobs_of(
        self, key: str, batch: TokenBatch, temperature: float, scales: Sequence[LayerScales]
    ) -> ScoredBatch:
        shared = [ray.put(each) for each in (batch, temperature, scales)]
        return cast(
            ScoredBatch,
            self._workers.call_all(self._workers.ranks, "call_with_part", self._key, "logprobs_of", key, *shared)[0],
        )

    def mix(self, policy: "RankedTrainer", share: float) -> None:
        self._workers.call_all(self._workers.ranks, "call_with_part", self._key, "mix", policy._key, share)
        self.version = policy.version

    def _common_report(self, reports: Sequence[TrainReport]) -> TrainReport:
        report = reports[0]
        common_value(
            self._workers.ranks, f"other weights after update {report.version}", [each.digest for each in reports]
        )
        self.version = report.version
        return report

    def describe(self) -> dict[str, object]:
        return cast("dict[str, object]", self._call("describe"))

    def export(self) -> RemoteWeights:
        exports = self._by_all("export")
        weights = RemoteWeights(exports, self._key)
        digests = [weights.digest() if export is None else export.digest for export in exports]
        common_value(self._workers.ranks, "other exported weights", digests)
        return weights

    def digest(self) -> str:
        digests: list[str] = self._by_all("digest")
        return common_value(self._workers.ranks, "other weights", digests)

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def save_policy(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._by_all("save_policy", folder, tokenizer)

    def load(self, folder: Path) -> None:
        self._call("load", folder)
        self.version = self._by_all("version")[0]

    def rest(self) -> None:
        self._call("rest")

    def close(self) -> None:
        if self._workers.alive:
            self._workers.call_all(self._workers.ranks, "drop", self._key)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._by_all("call", method, *arguments)[0]

    def _by_all(self, method: str, *arguments: Any) -> list[Any]:
        shared = [ray.put(each) for each in arguments]
        return self._workers.call_all(self._workers.ranks, "call", self._key, method, *shared)
