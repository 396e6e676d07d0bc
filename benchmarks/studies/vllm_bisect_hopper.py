"""Where vLLM's log-probs leave the exact reference, on one Hopper GPU: operation by operation, on the same bytes.

    python -m benchmarks.studies.vllm_bisect_hopper --out F                    every precision, side by side
    python -m benchmarks.studies.vllm_bisect_hopper --out F --hidden 256 bf16    one of them, smaller
    python -m benchmarks.studies.vllm_bisect_hopper --out F --experts 8          of eight experts a token goes to two

Qwen3's shape with random weights of ordinary and of twice the spread. Every precision runs in processes of its own. One
is eager, where each module can be inspected. One is compiled, where only log-probs are visible. One is compiled with
vLLM's own kernels between products. On a CPU, where vLLM has no FP8, the reference is compared with itself. FOLDER gets
vllm_bisect.json, a list of rows of kind "vllm_bisect"; `part` is the kind of a row:

    operation        error of each operation (`fp8core.alignment.operations.OperationError`)
    remaining        mean error of log-probs when the reference goes on from vLLM's values after an operation
    rounding_points  share of elements that an operation makes differently, by where the reference rounds inside it
    logprobs         two sides against one another, among them vLLM's decoding against its own prefill, transformers in
                     BF16, and the reference with each of its `RoundingPoints`
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import vllm_hopper_cases as cases
from benchmarks.harness import ended, provenance, start
from fp8core.alignment.operations import Operation, Values, compare, logprobs_of, operations, remaining, trace
from fp8core.config.capability import this_platform
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture, Experts, architecture_to_hf
from fp8core.models.weights import (
    Formats,
    PolicyWeights,
    load_policy,
    reference_formats,
    rollout_formats,
    training_formats,
)
from fp8core.numerics.elementwise import (
    FUSED,
    KERNELS,
    NATIVE,
    NOWHERE,
    STEPWISE,
    Rounding,
    RoundingPoints,
    keep_fp32,
    round_to_bf16,
)
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.processes.variables import set_variables
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import PolicyScales, PromptGroup, Sampling
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.rollout.vllm.worker import CAPTURING, captured_values
from fp8core.training.exact import ExactTrainer

PRECISIONS = ("bf16", "fp8_linear", "fp8_linear_kv")
_SPREADS = (1.0, 2.0)
_PROMPT, _GENERATED, _SEQUENCES, _BISECTED = 32, 64, 4, 2
# vLLM's own kernels between products, compiled, are measured under one contract; FP8 on a CPU without vLLM.
_ON_GPU = {
    "bf16": ("eager", "compiled"),
    "fp8_linear": ("eager", "compiled"),
    "fp8_linear_kv": ("eager", "compiled", "kernels"),
}
_ON_CPU = {"bf16": ("eager",), "fp8_linear": ("reference",), "fp8_linear_kv": ("reference",)}
_MODES = (STEPWISE, NATIVE, KERNELS, FUSED)
# Roundings inside an operation (fields of RoundingPoints), by the end of its name.
_POINTS = {
    "layernorm": ("sums", "normalised"),
    "model.norm": ("sums", "normalised"),
    "q_norm": ("normalised",),
    "k_norm": ("normalised",),
    "rotary_emb": ("tables",),
    "act_fn": ("activated",),
    "self_attn.attn": ("weights",),
    ".mlp": ("expert_activated", "routed", "gates"),
}


@dataclass(frozen=True)
class Subject:
    """A policy and the sequences that vLLM sampled from it: prompt, completion, log-probs of its decoding."""

    arch: Architecture
    formats: Formats
    masters: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    weights: PolicyWeights
    scales: PolicyScales
    prompts: Sequence[list[int]] = ()
    completions: Sequence[list[int]] = ()
    decoded: Sequence[Tensor] = ()

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens of each, and of its completion."""
        return [
            (torch.tensor(prompt + completion), torch.tensor(completion))
            for prompt, completion in zip(self.prompts, self.completions, strict=True)
        ]


class Rows:
    """Rows of one process, on disk after each."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path, self._about, self._rows = path, about, list[dict[str, Any]]()

    def add(self, part: str, **row: Any) -> None:
        self._rows.append({"kind": "vllm_bisect", "part": part, **self._about, **row})
        self._path.write_text(json.dumps(self._rows, indent=1) + "\n", encoding="utf-8")

    def within(self, **about: Any) -> "Rows":
        """The same file, with more fields in every row."""
        inner = Rows(self._path, self._about | about)
        inner._rows = self._rows
        return inner


def main() -> None:
    options = _options()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        _measure(options)
        return
    ways = _ON_CPU if this_platform() == "cpu" else _ON_GPU
    names = [f"{precision}.{way}" for precision in options.names or PRECISIONS for way in ways[precision]]
    deadline = time.monotonic() + options.seconds
    started = [(name, _start(name, options)) for name in names]
    rows = [row for name, process in started for row in _finished(name, process, options.out, deadline)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    (options.out / "vllm_bisect.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(_tables(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bisect vLLM against the exact reference on one Hopper GPU.")
    parser.add_argument("names", nargs="*", metavar="PRECISION", help=f"of {', '.join(PRECISIONS)}; all when none")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=240.0, help="budget; what runs longer is ended")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0, help="of every layer but the second; none: a dense model")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(name: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.studies.vllm_bisect_hopper", name, "--inside"]
    command += [f"--{key}={getattr(options, key)}" for key in ("out", "layers", "hidden", "experts")]
    with (options.out / f"{name}.log").open("wb") as log:
        return start(command, log)


def _finished(name: str, process: "subprocess.Popen[bytes]", out: Path, deadline: float) -> list[dict[str, Any]]:
    """Rows of a process that has ended or is ended now, and its log where it failed."""
    code = ended(process, deadline)
    written, log = out / f"{name}.rows.json", out / f"{name}.log"
    rows = json.loads(written.read_text()) if written.exists() else []
    written.unlink(missing_ok=True)
    if code:
        print(f"{name} ended with {code}:\n{log.read_text(errors='replace')[-8000:]}", flush=True)
    else:
        log.unlink()
    return list(rows)


def _measure(options: argparse.Namespace) -> None:
    (name,) = options.names
    precision, mode = name.split(".")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    points = "kernels" if mode == "kernels" else "stepwise"
    contract = cases.contract(precision).model_copy(update={"rounding_points": points})
    about = {"precision": precision, "mode": mode, "layers": options.layers, "hidden": options.hidden}
    about |= provenance()
    about |= {"experts": options.experts}
    sizes = f"--layers {options.layers} --hidden {options.hidden} --experts {options.experts}"
    about |= {"command": f"python -m benchmarks.studies.vllm_bisect_hopper {sizes} {precision}"}
    rows, arch = Rows(options.out / f"{name}.rows.json", about), _architecture(options)
    if mode == "reference":
        for spread in _SPREADS:
            _look_at_reference(_subject(arch, contract, spread), rows.within(spread=spread))
        return
    with _started(arch, contract, mode, rows) as (engine, within):
        for spread in _SPREADS:
            began = time.perf_counter()
            subject = _synchronised(engine, _subject(arch, contract, spread))
            (_look_inside if mode == "eager" else _look_outside)(engine, subject, within.within(spread=spread))
            within.add("seconds", spread=spread, seconds=round(time.perf_counter() - began, 1))


@contextmanager
def _started(arch: Architecture, contract: PrecisionContract, mode: str, rows: Rows) -> Iterator[tuple[Any, Rows]]:
    """A vLLM that is closed in the end, and rows that name it."""
    settings = cases.options(kv_cache_gib=2.0 if this_platform() != "cpu" else 0.5, graphs=mode != "eager")
    build = cases.build()
    suggested = suggested_environment(1, build)
    set_variables(required_environment(contract, settings, build), suggested)
    from fp8core.rollout.vllm.engine import VllmEngine

    began = time.perf_counter()
    engine = VllmEngine(arch, contract, settings, 16, build, CAPTURING)
    within = rows.within(vllm=f"{build.distribution} {build.version}")
    try:
        within.add("start", seconds=round(time.perf_counter() - began, 1), described=cases.summary(engine.describe()))
        yield engine, within
    finally:
        engine.close()


def _architecture(options: argparse.Namespace) -> Architecture:
    sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
    sizes |= {"num_heads": options.hidden // 64, "num_kv_heads": options.hidden // 128}
    dense = replace(cases.qwen3_8b(options.layers), vocab_size=2048, max_positions=4096, **sizes)
    if not options.experts:
        return dense
    experts = Experts(
        count=options.experts,
        per_token=2,
        intermediate_size=options.hidden,
        normalise_top_k=True,
        sparse_step=1,
        dense_layers=(1,),
    )
    return replace(dense, family="qwen3_moe", experts=experts)


def _subject(arch: Architecture, contract: PrecisionContract, spread: float) -> Subject:
    """Random weights; scales of the cache calibrated on random prompts."""
    masters = cases.random_masters(arch, spread)
    formats = training_formats(contract, arch.num_layers), rollout_formats(contract, arch.num_layers)
    trainer = ExactTrainer(arch, masters, *formats, TrainingConfig(), Objective(LossConfig(), CorrectionConfig()))
    amax = trainer.statistics(TokenBatch.of([group.prompt for group in _groups(4, seed=100)], [[5]] * 4)).amax()
    scales = PolicyScales(0, tuple(scales_from_statistics(amax, 2.0, contract.scale_rule)))
    stored = trainer.export()
    return Subject(arch, formats[1], masters, stored, load_policy(arch, stored), scales)


def _synchronised(engine: Any, subject: Subject) -> Subject:
    """The engine gets the policy and samples from it."""
    cuda = this_platform() != "cpu"
    engine.update({n: t.cuda() if cuda else t for n, t in subject.stored.items()}, subject.scales, 0)
    return _sampled(engine, subject)


def _sampled(engine: Any, subject: Subject) -> Subject:
    """Completions at temperature 1."""
    groups, sampling = _groups(_SEQUENCES, seed=1), Sampling(1.0, _GENERATED, frozenset())
    found = sorted((done for part in engine.generate(groups, sampling) for done in part), key=lambda done: done.group)
    return replace(
        subject,
        prompts=[list(group.prompt) for group in groups],
        completions=[done.tokens for done in found],
        decoded=[torch.tensor(done.logprobs) for done in found],
    )


def _groups(count: int, seed: int) -> list[PromptGroup]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, 2048, (count, _PROMPT), generator=generator).tolist()
    return [PromptGroup(i, f"{seed}-{i}", tuple(tokens), (0,), (i,)) for i, tokens in enumerate(drawn)]


def _look_outside(engine: Any, subject: Subject, rows: Rows) -> None:
    """Log-probs of decoding against every reference."""
    for points in _MODES:
        expected = _reference(subject, points)
        rows.add("logprobs", sides=["vllm decode", f"reference {points.name}"], **_distance(subject.decoded, expected))


def _look_at_reference(subject: Subject, rows: Rows) -> None:
    """Effect of other rounding points alone on the same bytes in exact arithmetic, beside that of BF16."""
    engine = EmbeddedEngine(subject.arch, subject.formats.with_points(FUSED), _SEQUENCES)
    engine.update(subject.stored, subject.scales, 0)
    subject = _sampled(engine, subject)
    sides = {f"reference {points.name}": _reference(subject, points) for points in _MODES}
    _compare_sides(sides | {"reference in bf16": _in_bf16(subject)}, rows)


def _compare_sides(sides: Mapping[str, Sequence[Tensor]], rows: Rows) -> None:
    for (a, left), (b, right) in itertools.combinations(sides.items(), 2):
        rows.add("logprobs", sides=[a, b], **_distance(left, right))


def _look_inside(engine: Any, subject: Subject, rows: Rows) -> None:
    """Log-probs of all sides, then the operations, then the bisect."""
    traces = [captured_values(engine, subject.arch, tokens.tolist()) for tokens, _ in subject.sequences()]
    prefill = _scored(subject, [values[-1]["logits"] for values in traces])
    sides = {"vllm prefill": prefill, "vllm decode": subject.decoded}
    measured = _compare_points(subject, traces[0], rows)
    for points in (*_MODES, measured):
        sides[f"reference {points.name}"] = _reference(subject, points)
    if subject.formats.layers[0].qkv.name != "bf16":
        sides["reference in bf16"] = _in_bf16(subject)
    else:
        sides["fp32"] = _fp32(subject)
        if not subject.arch.sparse_layers:
            # Its mixture of experts has other parameters.
            sides["transformers"] = _transformers(subject)
    _compare_sides(sides, rows)
    for points in (STEPWISE, measured):
        _compare_operations(subject, points, traces, rows)
    _bisect(subject, measured, traces[:_BISECTED], rows)


def _chains(subject: Subject, points: RoundingPoints) -> list[list[Operation]]:
    formats, scales = subject.formats.with_points(points), subject.scales.layers
    return [operations(subject.arch, formats, subject.weights, tokens, scales) for tokens, _ in subject.sequences()]


def _reference(subject: Subject, points: RoundingPoints) -> list[Tensor]:
    chains = _chains(subject, points)
    return _scored(subject, [trace(chain)[-1]["logits"] for chain in chains])


def _scored(subject: Subject, logits: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs of every completion, from the logits of every sequence."""
    pairs = zip(logits, subject.sequences(), strict=True)
    return [logprobs_of(tensor, completion, 1.0) for tensor, (_, completion) in pairs]


def _fp32(subject: Subject) -> list[Tensor]:
    """No rounding at all, on weights rounded to BF16."""
    formats = reference_formats(subject.arch.num_layers)
    rounded = {name: master.bfloat16().float() for name, master in subject.masters.items()}
    exact = replace(subject, formats=formats, weights=load_policy(subject.arch, rounded))
    return _reference(exact, formats.points)


def _in_bf16(subject: Subject) -> list[Tensor]:
    """The same policy in the reference's BF16."""
    formats = rollout_formats(cases.contract("bf16"), subject.arch.num_layers)
    rounded = {name: master.bfloat16() for name, master in subject.masters.items()}
    plain = replace(subject, formats=formats, weights=load_policy(subject.arch, rounded))
    return _reference(plain, formats.points)


@torch.no_grad()
def _transformers(subject: Subject) -> list[Tensor]:
    """transformers in BF16, on the GPU where there is one; its logits are BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = architecture_to_hf(subject.arch, bos_id=None, eos_ids=[0], pad_id=None, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.load_state_dict({name: master.bfloat16() for name, master in subject.masters.items()})
    model = model.to("cpu" if this_platform() == "cpu" else "cuda").eval()
    tokens = [tokens[None].to(model.device) for tokens, _ in subject.sequences()]
    return _scored(subject, [model(sequence).logits[0].float().cpu() for sequence in tokens])


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> dict[str, Any]:
    difference = (torch.cat(list(left)) - torch.cat(list(right))).abs().double()
    return {
        "tokens": len(difference),
        "mean": float(difference.mean()),
        "median": float(difference.median()),
        "largest": float(difference.max()),
        "mult_prob_error": float(difference.exp().mean()),
    }


def _compare_operations(subject: Subject, points: RoundingPoints, traces: Sequence[Any], rows: Rows) -> None:
    pairs = zip(_chains(subject, points), traces, strict=True)
    for errors in zip(*(compare(chain, seen) for chain, seen in pairs), strict=True):
        numbers = [f.name for f in fields(errors[0]) if f.name not in ("operation", "value")]
        listed = {n: [v for error in errors if (v := getattr(error, n)) is not None] for n in numbers}
        mean = {n: statistics.fmean(values) if values else None for n, values in listed.items()}
        rows.add("operation", points=points.name, **(asdict(errors[0]) | mean))


def _compare_points(subject: Subject, seen: Sequence[Values], rows: Rows) -> RoundingPoints:
    """Every combination of roundings inside an operation, on vLLM's own inputs; the points that come nearest."""
    found: dict[tuple[str, tuple[tuple[str, Rounding], ...]], list[float]] = {}
    for kind, rounded in _combinations():
        chain = _chains(subject, replace(NOWHERE, **dict(rounded)))[0]
        for operation, before, after in zip(chain[1:], seen, seen[1:], strict=False):
            # The first norm has no sum.
            if not operation.name.endswith(kind) or ("residual" not in before and "sums" in _POINTS[kind]):
                continue
            value = operation.writes[0]
            share = float((operation.after(before)[value] != after[value]).double().mean())
            found.setdefault((operation.name.rpartition(".")[2], rounded), []).append(share)
    nearest: dict[str, Rounding] = {}
    for (kind, rounded), shares in sorted(found.items(), key=lambda item: -statistics.fmean(item[1])):
        names = {field: "fp32" if rounding is keep_fp32 else "bf16" for field, rounding in rounded}
        rows.add("rounding_points", operation=kind, **names, differing=statistics.fmean(shares))
        nearest |= dict(rounded)
    # A dense model has no experts, and nothing else goes unmeasured.
    absent = set() if subject.arch.sparse_layers else set(_POINTS[".mlp"])
    assert nearest.keys() | absent == {field.name for field in fields(RoundingPoints)} - {"name"}
    return replace(NOWHERE, name="measured", **nearest)


def _combinations() -> Iterator[tuple[str, tuple[tuple[str, Rounding], ...]]]:
    """Every choice of roundings that an operation has, by the end of its name."""
    for kind, places in _POINTS.items():
        for choice in itertools.product((keep_fp32, round_to_bf16), repeat=len(places)):
            yield kind, tuple(zip(places, choice, strict=True))


def _bisect(subject: Subject, points: RoundingPoints, traces: Sequence[Any], rows: Rows) -> None:
    chains = _chains(subject, points)
    differences = []
    for chain, seen, (_, completion) in zip(chains, traces, subject.sequences(), strict=False):
        scored = remaining(chain, seen, completion, 1.0)
        differences.append((scored - scored[-1]).abs())
    means = torch.cat(differences, dim=1).mean(dim=1).tolist()
    for name, mean in zip(["tokens", *(operation.name for operation in chains[0])], means, strict=True):
        rows.add("remaining", points=points.name, after=name, mean=mean)


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    """Log-probs and rounding points as text; the rest is in the file."""
    lines = []
    for row in rows:
        where = f"{row['precision']:14} {row['mode']:8} {row.get('spread', ''):>4}"
        if row["part"] == "logprobs":
            lines.append(f"{where} {' / '.join(row['sides']):42} {row['mean']:.4f} tmpe {row['mult_prob_error']:.4f}")
        if row["part"] == "rounding_points":
            points = " ".join(
                f"{field.name}={row[field.name]}" for field in fields(RoundingPoints)[1:] if field.name in row
            )
            lines.append(f"{where} {row['operation']:26} {points:30} differing {row['differing']:.5f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
