"""How one policy replaces another in an engine with processes of its own; the test's has its parameters here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.engine import PolicyScales, Probe, PromptGroup, Sampling, finish_of
from fp8core.rollout.resident import Output, Request, ResidentEngine, recorded_experts
from fp8core.rollout.shared_weights import share_weights, specs_of
from fp8core.rollout.slots import EngineUpdateError, Share, find_shares
from fp8core.rollout.worker_policy import WorkerPolicy

ARCH = HUB_ARCHITECTURES["Qwen/Qwen3-30B-A3B"]
PROJECTIONS = {"q": 256, "k": 128, "v": 128}
LAYER = "model.layers.0.self_attn"
SAMPLING = Sampling(1.0, 4, frozenset({9}))


class HereEngine(ResidentEngine):
    """Two processes with all parameters each. `log` has what was asked of them and of the memory."""

    product = "Here"

    def __init__(self, sleeps: bool = False) -> None:
        super().__init__(ARCH, PrecisionContract(), lowest=0.5, sleeps=sleeps, routes=False)
        self.log: list[str] = []
        self.kept_prefixes = False
        self.policies = [HerePolicy(), HerePolicy()]
        self._read_parameters()

    def close(self) -> None: ...

    def drop_prefixes(self) -> bool:
        return not self.kept_prefixes

    def prepare(self, sampling: Sampling, *groups: PromptGroup) -> None:
        self.open_session(sampling).add(groups)

    def ask_policies(self, method: str, *arguments: Any) -> list[Any]:
        self.log.append(method)
        return [policy.answer(method, *arguments) for policy in self.policies]

    def _description(self, description: Mapping[str, Any]) -> dict[str, object]:
        return {}

    def _find_shares(self, sent: Mapping[str, Any]) -> list[Share]:
        return 2 * find_shares(sent, {}, self._parameters)

    def _wake(self, part: str) -> None:
        self.log.append(f"wake {part}")

    def _fall_asleep(self) -> None:
        self.log.append("fall asleep")

    def _begin(self, temperature: float, truncation: object) -> None:
        self.running: dict[int, Request] = {}

    def _submit(self, requests: Mapping[int, Request]) -> None:
        self.running |= requests

    def _outputs(self) -> list[tuple[int, Output]]:
        """The newest request has ended; its tokens count on, each with a log-prob of minus its number."""
        number, request = self.running.popitem()
        tokens = list(range(len(request.tokens), len(request.tokens) + request.max_tokens))
        target = None if request.target is None else (request.target, -1.0 * request.target)
        return [(number, Output(tokens, [-1.0 * token for token in tokens], "length", target))]

    def _end(self, running: Sequence[int]) -> None:
        self.ended = list(running)


class Model(nn.Module):
    """Q, K and V of one layer as one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict()})])})
        rows = torch.zeros(sum(PROJECTIONS.values()), 8)
        self.get_submodule(LAYER).add_module("qkv_proj", nn.ParameterDict({"weight": rows}))


class HerePolicy(WorkerPolicy):
    def __init__(self) -> None:
        super().__init__(Model(), torch.device("cpu"))
        self._in_force = [[1.0] * 3] * ARCH.num_layers

    def describe(self) -> dict[str, Any]:
        return {}

    def _has_scales(self) -> bool:
        return True

    def _write_scales(self, scales: Sequence[Sequence[float]]) -> None:
        self._in_force = [list(layer) for layer in scales]

    def _read_scales(self) -> list[list[float]]:
        return self._in_force

    def _caches(self) -> Iterable[Tensor]:
        return ()

    def clear_weights(self) -> None:
        for parameter in self._parameters_by_name().values():
            parameter.zero_()


def policy(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{LAYER}.{n}_proj.weight": torch.randn(rows, 8, generator=generator) for n, rows in PROJECTIONS.items()}


def scales(version: int) -> PolicyScales:
    return PolicyScales(version, (LayerScales(1.0, 2.0, 4.0),) * ARCH.num_layers)


def test_what_is_held_after_an_update_is_what_was_sent() -> None:
    engine = HereEngine()
    for version in (0, 1):
        report = engine.update(policy(version), scales(version), version)
        assert (report.version, report.digest, report.scales) == (
            version,
            policy_digest(policy(version)),
            scales(version),
        )
        assert engine.fingerprint() == report.digest
        engine.prepare(SAMPLING)


def test_a_policy_in_parts_is_held_when_all_of_it_is_written() -> None:
    engine, sent = HereEngine(), policy(0)
    engine.expect(specs_of(sent), scales(0), 0)
    for i, (name, tensor) in enumerate(sent.items()):
        with pytest.raises(AssertionError, match=f"{3 - i} expected tensors are not written"):
            engine.finish(scales(0), 0)
        with pytest.raises(AssertionError, match=r"update\(\) comes before"):
            engine.fingerprint()
        with pytest.raises(AssertionError, match=r"update\(\) comes before"):
            engine.prepare(SAMPLING)
        with share_weights({name: tensor}) as shared:
            engine.write(shared)
    assert engine.finish(scales(0), 0).digest == policy_digest(sent)
    assert engine.log.count("begin") == 1


def test_what_does_not_fit_leaves_the_policy_as_it_was() -> None:
    engine = HereEngine()
    engine.update(policy(0), scales(0), 0)
    engine.log.clear()
    short = {**policy(1), f"{LAYER}.v_proj.weight": torch.zeros(64, 8)}
    with pytest.raises(EngineUpdateError, match="448 of its 512 rows were sent"):
        engine.update(short, scales(1), 1)
    with pytest.raises(ValueError, match="scales of policy 0 sent with weights of policy 1"):
        engine.update(policy(1), scales(0), 1)
    assert engine.log == []
    assert engine.fingerprint() == policy_digest(policy(0))
    engine.update(policy(1), scales(1), 1)
    assert engine.fingerprint() == policy_digest(policy(1))


def test_an_engine_that_sleeps_holds_nothing_until_an_update_wakes_it() -> None:
    engine = HereEngine(sleeps=True)
    engine.update(policy(0), scales(0), 0)
    engine.log.clear()
    engine.sleep()
    engine.sleep()
    assert engine.log == ["fall asleep"]
    with pytest.raises(AssertionError, match=r"also after sleep\(\)"):
        engine.fingerprint()
    engine.log.clear()
    engine.update(policy(0), scales(0), 0)
    assert engine.log[:-2] == ["wake weights", "begin", "write", "end", "wake kv_cache", "clear_cache"]
    assert engine.log[-2:] == ["set_scales", "read_back"]
    engine.log.clear()
    engine.update(policy(1), scales(1), 1)
    assert engine.log == ["begin", "write", "end", "set_scales", "read_back"]


def test_an_engine_that_keeps_prefixes_of_another_policy_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HereEngine()
    engine.kept_prefixes = True
    with pytest.raises(EngineUpdateError, match="Here kept its prefix cache"):
        engine.update(policy(0), scales(0), 0)
    with pytest.raises(AssertionError, match=r"update\(\) comes before"):
        engine.prepare(SAMPLING)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (("end", 3), "versions"),
        (("set_scales", [[1.0] * 3] * ARCH.num_layers), "scales"),
        (("clear_weights",), r"bytes of model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
)
def test_processes_that_hold_different_things_are_refused(difference: tuple[Any, ...], words: str) -> None:
    engine = HereEngine()
    engine.update(policy(0), scales(0), 0)
    engine.policies[1].answer(*difference)
    with pytest.raises(EngineUpdateError, match=f"Here's 2 workers hold different {words}"):
        engine._read_back(scales(0))


def test_a_generation_that_cannot_be_is_refused() -> None:
    engine = HereEngine()
    engine.update(policy(0), scales(0), 0)
    with pytest.raises(UserError, match=r"rollout.temperature=0.1: Here samples at 0.5 or above"):
        engine.prepare(Sampling(0.1, 4, frozenset()))
    with pytest.raises(AssertionError, match="without routes"):
        engine.prepare(Sampling(1.0, 4, frozenset(), report_experts=True))


def test_groups_come_whole_and_what_is_left_is_dropped() -> None:
    engine = HereEngine()
    engine.update(policy(0), scales(0), 0)
    groups = [PromptGroup(i, f"{i}", (1,) * (2 + i), (0, 1), (7, 8)) for i in range(2)]
    first, second = engine.generate(groups, SAMPLING)
    assert [{(done.group, done.sample) for done in part} for part in (first, second)] == [
        {(1, 0), (1, 1)},
        {(0, 0), (0, 1)},
    ]
    assert {(tuple(done.tokens), done.finish) for done in first} == {((3, 4, 5, 6), "length")}
    assert engine.ended == []
    running = engine.generate(groups, SAMPLING)
    next(running)
    running.close()
    assert len(engine.ended) == 2
    assert engine.score([Probe((1,), 5), Probe((1, 2), 6)], 1.0) == [[-5.0, -6.0]]


@pytest.mark.parametrize(
    ("tokens", "begun", "finish"),
    [([1, 2], 0, "open"), ([1, 2], 2, "length"), ([1, 9], 0, "stop"), ([1, 9], 2, "stop"), ([9, 1, 1, 1], 0, "length")],
)
def test_a_stop_token_that_is_the_last_of_all_is_a_stop(tokens: list[int], begun: int, finish: str) -> None:
    assert finish_of(tokens, begun, SAMPLING) == finish


def test_room_is_what_is_left_and_no_more_than_was_given() -> None:
    fresh = PromptGroup(0, "fresh", (1, 2), (0, 1), (7, 8))
    begun = PromptGroup(0, "begun", (1, 2), (0, 1), (7, 8), prefix_tokens=((3,), (3, 4, 5)), max_tokens=(2, 2))
    assert [fresh.max_tokens_of(i, 4) for i in (0, 1)] == [4, 4]
    assert [begun.max_tokens_of(i, 4) for i in (0, 1)] == [2, 1]
    assert [fresh.context(1), begun.context(1)] == [(1, 2), (1, 2, 3, 4, 5)]


def test_recorded_experts_are_ascending_and_of_sparse_layers_alone():
    chosen = np.array([[[3, 1], [0, 0], [0, 2]], [[2, 0], [0, 0], [1, 3]]])
    found = recorded_experts(chosen, (0, 2), 2)
    assert (found.dtype, found.tolist()) == (torch.int16, [[[1, 3], [0, 2]], [[0, 2], [1, 3]]])


@pytest.mark.parametrize(
    ("chosen", "positions", "said"),
    [
        (None, 2, "the experts of nothing of 2 positions"),
        (np.zeros((2, 1, 2)), 3, "of 2 of 3"),
        (np.zeros((2, 1, 2)), 2, "one expert twice"),
    ],
)
def test_experts_that_were_not_recorded_are_none(chosen, positions, said):
    with pytest.raises(RuntimeError, match=said):
        recorded_experts(chosen, (0,), positions)
