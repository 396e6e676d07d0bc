"""Run the deployments of the published models at reduced size on Hopper GPUs, through `prefect deployment run`.

    python -m benchmarks.deployment_hopper --out D --seconds 540                all on one GPU, one after another
    python -m benchmarks.deployment_hopper --out D --seconds 540 qwen3-moe      one of them
    python -m benchmarks.deployment_hopper --out D --seconds 540 qwen3/tp2      one of them on several GPUs
    python -m benchmarks.deployment_hopper --out D --device cpu                 a rehearsal, without vLLM and FP8

Each has a random checkpoint of its family and problems in a file. `fp8-grpo up` serves them, and each is started as in
docs/guides/operate.md. Its parameters make it small: model, problems, batch, lengths, one GPU, not eight. One more
is unlike a training: the verifier (`benchmarks.random_reward`), because random weights solve nothing and would
be updated by nothing.

No command of the environment is needed, only its Python. D/deployment.json has a row for each, written as soon as it
ends, D/logs the output. Models, runs and the servers' data lie in --work, where they are large. A second call runs
those that are not completed.
"""

import argparse
import base64
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, Row, provenance, table, write_rows
from benchmarks.large_ledger import make_model
from benchmarks.small_hopper import run_provenance, seconds_by_task
from flows.pools import GPU
from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.hub import PUBLISHED
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.processes.end_with_parent import installed
from fp8core.report.run_data import RunData, read_run
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER, POLICY, checkpoint_place
from fp8core.store.ledger import START
from fp8core.store.metrics import REWARD, TMPE, series
from fp8core.store.run_view import inspect_manifest

MODELS = ("llama", "qwen3", "qwen3-moe")
"""Configurations; each names its published model."""

GRIDS: dict[str, dict[str, Any]] = {
    "one": {"cluster.ranks": 1, "cluster.engines": 1},
    "dp2": {"cluster.ranks": 2, "cluster.engines": 2},
    "pp2": {"cluster.ranks": 2, "cluster.engines": 2, "training.megatron.pipeline_parallel": 2},
    "tp2": {
        **{"cluster.ranks": 2, "cluster.engines": 2, "training.megatron.tensor_parallel": 2},
        "training.megatron.sequence_parallel": True,
    },
    "ep2": {"cluster.ranks": 2, "cluster.engines": 2, "training.megatron.expert_parallel": 2},
    "dp2-tp2": {
        **{"cluster.ranks": 4, "cluster.engines": 4, "training.megatron.tensor_parallel": 2},
        "training.megatron.sequence_parallel": True,
    },
}
"""Settings that spread a small run over GPUs: data, pipeline, tensor with sequence, and expert parallel."""

# Seen from the working directory of a deployment, which is the checkout.
_COIN = "benchmarks/random_reward.py:score"
# True 128 x 128 tiles in every linear, heads of 128, groups of four queries. DeepGEMM's experts are put together for
# hidden sizes that are powers of two.
_SHAPES: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2},
    "cpu": {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
}
_HEAD = {"cuda": 128, "cpu": 32}
_EXPERTS = {"cuda": (16, 4, 512), "cpu": (4, 2, 128)}
_VOCABULARY = 512

_SMALL: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"rollout.prompts_per_step": 8, "rollout.group_size": 8, "rollout.max_new_tokens": 128},
        # Some 16,000 tokens a step: several packs, of different lengths, for processes to share and stages to pass on.
        "training.megatron.micro_batch_tokens": 4096,
    },
    "cpu": {
        **{"rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 8, "threads": 1},
        # Megatron's format on a CPU.
        "precision": {
            "rollout": {"linear": "fp32", "kv_cache": "fp32"},
            "training": {"linear": "fp32", "kv_cache": "fp32"},
            "rounding_points": "stepwise",
        },
        **{"rollout.engine": "embedded", "training.megatron.recompute": "none"},
    },
}

CASES = (*MODELS, *(f"qwen3/{grid}" for grid in ("dp2", "pp2", "tp2", "dp2-tp2")), "qwen3-moe/ep2")
"""What can be run: a configuration on one GPU, or on the GPUs of a grid."""


def parts_of(case: str) -> tuple[str, str]:
    """The configuration and the grid of a case."""
    name, _, grid = case.partition("/")
    return name, grid or "one"


def small_model(name: str, device: str) -> Architecture:
    """The family and details of the configuration's model at a small shape; its weights are drawn by `make_model`."""
    published = PUBLISHED[str(load_config(name).model)]
    if (experts := published.experts) is not None:
        count, per_token, width = _EXPERTS[device]
        experts = replace(experts, count=count, per_token=per_token, intermediate_size=width)
    return replace(published, **_SHAPES[device], head_dim=_HEAD[device], vocab_size=_VOCABULARY, experts=experts)


def small_settings(device: str, grid: str) -> dict[str, Any]:
    """Overrides of a configuration beside model and problems, by dotted key."""
    # Experts stay whole unless the grid shares them.
    spread = {"training.megatron.expert_parallel": 1, **GRIDS[grid]}
    return {**spread, **_SMALL[device], "evaluation.prompts": 8, "reward.verifier": _COIN}


def small_problems(path: Path) -> Path:
    """Write sums in GSM8K's format, some of which are held out."""
    rows = [
        {"question": f"Tom has {a} apples and buys {b} more. How many are there now?", "answer": f"#### {a + b}"}
        for a in range(3, 19)
        for b in range(2, 18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Of every tensor, or of every layer and step.
_LONG = ("dtypes", "scales", "linear")


def run_facts(folder: Path) -> Row:
    """Steps, mismatch, digests, seconds, what ran and where; without a committed iteration only that there is none."""
    if not (folder / LEDGER).exists():
        return {"steps": 0}
    run = read_run(folder, folder.name)
    last = max(run.view.steps, default=START)
    if last == START:
        return {"steps": 0}
    return {
        "steps": last,
        "tmpe": list(series(run.history, TMPE)[1]),
        "rewards": list(series(run.history, REWARD)[1]),
        "task_seconds": seconds_by_task(run),
        **_digests(run, last),
        "ran": _executed(run, last),
        **run_provenance(run.view),
    }


def _digests(run: RunData, last: int) -> Row:
    """Of the weights that vLLM read back in each step (`tasks/sync.py` compared them with what was sent) and of the
    trainer's. `checkpoint_is_held`: vLLM holds the last checkpoint, quantised anew."""
    store = ArtifactStore(run.view.folder)
    steps = [run.view.steps[index] for index in range(START + 1, last + 1)]
    held = [store.get_json(commit.artifacts["sync_report"])["digest"] for commit in steps]
    trained = [_manifest(run, commit.step).record.weights_digest for commit in steps]
    return {"engine_digests": held, "weights_digests": trained, "checkpoint_is_held": _is_held(run, last, held[-1])}


def _is_held(run: RunData, last: int, held: str) -> bool | None:
    """None where there is no checkpoint of the last step, or one that is narrower than what the engine holds."""
    folder, config = run.view.folder / checkpoint_place(last) / POLICY, run.view.config
    if config is None or config.precision.rollout.linear == "fp32" or not folder.is_dir():
        return None
    checkpoint = load_checkpoint(folder)
    formats = rollout_formats(config.precision, checkpoint.architecture.num_layers)
    tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    return policy_digest(stored_weights(tensors, formats.stored_names(), formats.recipe.weights)) == held


def _executed(run: RunData, step: int) -> Row:
    """Settings that engine, trainer and verifier reported, without those of every tensor."""
    executed = _manifest(run, step).record.executed
    return {
        name: {key: value for key, value in said.items() if key not in _LONG} if isinstance(said, dict) else said
        for name, said in executed.items()
    } | {f"{name}_linear": sorted({*said["linear"]}) for name, said in executed.items() if _has_linears(said)}


def _has_linears(said: Any) -> bool:
    return isinstance(said, dict) and isinstance(said.get("linear"), list)


def _manifest(run: RunData, step: int) -> Any:
    manifest, problems = inspect_manifest(run.view.folder, run.view.steps[step])
    assert manifest is not None, problems
    return manifest


_START_SECONDS, _END_SECONDS, _POLL_SECONDS = 300.0, 60.0, 0.5


@dataclass(frozen=True)
class Deployments:
    """Served deployments: the environment of their clients, the folder of their logs, and the log of the worker."""

    environment: Mapping[str, str]
    logs: Path
    worker: Path

    def run(self, deployment: str, name: str, parameters: Mapping[str, Any], end: float) -> int:
        """`prefect deployment run --watch` until the run of this name ends, or `end` (time.monotonic); returns its exit
        code."""
        flags = [flag for key, value in parameters.items() for flag in ("--param", f"{key}={json.dumps(value)}")]
        command = [*_prefect("deployment", "run", f"fp8-grpo/{deployment}", "--watch", "--flow-run-name", name), *flags]
        with (self.logs / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=output, stderr=output)
            try:
                return process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def last_state(self, name: str) -> Mapping[str, Any]:
        """Type and message of the state of the newest flow run of that name."""
        query = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1}
        password = base64.b64encode(self.environment["PREFECT_API_AUTH_STRING"].encode()).decode()
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/flow_runs/filter",
            json.dumps(query).encode(),
            {"Content-Type": "application/json", "Authorization": f"Basic {password}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            runs = json.load(answer)
        state: Mapping[str, Any] = runs[0]["state"] if runs else {"type": None, "message": "it was not made"}
        return state

    def said(self, name: str) -> str:
        """Output of the command that started a deployment, and of the worker."""
        return "\n".join(log.read_text(errors="replace") for log in (self.logs / f"{name}.log", self.worker))


@contextmanager
def serving(work: Path, logs: Path, device: str) -> Iterator[Deployments]:
    """Prefect, MLflow, the deployments and a worker for those that need a GPU, while the block lasts.

    Args:
        work: folder for their data, and for runs.
        logs: folder for their output.
        device: `cpu` where there is no GPU.

    Raises:
        RuntimeError: `fp8-grpo up` did not become ready; the message holds its output.
    """
    # A run that an earlier call left unfinished would hold the GPU's pool until it is found dead.
    shutil.rmtree(work / "prefect", ignore_errors=True)
    login = f"benchmark:{secrets.token_urlsafe(32)}"
    ports, runs, worker = [str(port) for port in _free_ports(2)], work / "runs", f"worker-of-{GPU}.log"
    environment = {
        "PREFECT_HOME": str(work / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The nightly training may fall due, and would compute beside what is timed.
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        **{key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"},
        "PREFECT_SERVER_API_AUTH_STRING": login,
    }
    options = ["--prefect-port", ports[0], "--mlflow-port", ports[1], "--runs", str(runs)]
    command = [sys.executable, "-m", "flows.cli", "up", *options]
    clients = environment | {
        "PREFECT_API_URL": f"http://127.0.0.1:{ports[0]}/api",
        "PREFECT_API_AUTH_STRING": login,
    }
    began = time.monotonic()
    with _process(command, environment, logs / "up.log") as up:
        _wait_until_ready(up, logs / "up.log")
        print(f"up: {time.monotonic() - began:.0f} s", flush=True)
        try:
            if device == "cuda":
                yield Deployments(clients, logs, runs / "logs" / worker)
            else:
                # Where there is no GPU `up` starts no worker for them.
                tracked = clients | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{ports[1]}"}
                with _process(_prefect("worker", "start", "--pool", GPU), tracked, logs / worker):
                    yield Deployments(clients, logs, logs / worker)
        finally:
            shutil.copytree(runs / "logs", logs, dirs_exist_ok=True)


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, *installed("prefect"), *arguments]


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it by two requests, so that it does not wait for a training."""
    deadline = time.monotonic() + _END_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(up: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while "\nready: " not in log.read_text():
        if up.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"fp8-grpo up is not ready: {log.read_text()}")
        time.sleep(_POLL_SECONDS)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ports


RESULT = "deployment.json"
_SHOWN, _THREADS = 6_000, 4
_PRINTED = ("config", "grid", "state", "message", "steps", "seconds", "tmpe", "checkpoint_is_held")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not completed and write a row for each; returns 0 when all are completed, else 1."""
    options = _options(arguments)
    # Facts of a run are many small tensors: with a thread for every core of a large host they take minutes.
    torch.set_num_threads(_THREADS)
    end, out = time.monotonic() + options.seconds, options.out.absolute()
    for folder in (out / "logs", options.work):
        folder.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.deployment_hopper --out D --device {options.device} --steps {options.steps}"
    rows = {_case_of(row): row for row in _written(out / RESULT) if row["device"] == options.device}
    left = [name for name in options.names if not _completed(rows, name)]
    if left:
        with serving(options.work, out / "logs", options.device) as deployments:
            for row in _run_all(left, deployments, options, end):
                rows[_case_of(row)] = row | {"command": f"{command} {_case_of(row)}"}
                write_rows(out / RESULT, rows.values())
                print(json.dumps({key: row.get(key) for key in _PRINTED}), flush=True)
    return 0 if all(_completed(rows, name) for name in options.names) else 1


def _case_of(row: Row) -> str:
    return str(row["config"]) if row["grid"] == "one" else f"{row['config']}/{row['grid']}"


def _completed(rows: Mapping[str, Row], name: str) -> bool:
    return rows.get(name, {}).get("state") == "COMPLETED"


def _written(path: Path) -> list[Row]:
    found: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return found


def _run_all(names: Sequence[str], deployments: Deployments, options: argparse.Namespace, end: float) -> Iterator[Row]:
    problems = small_problems(options.work / "problems.jsonl")
    for case in names:
        if time.monotonic() > end:
            return
        config, _ = parts_of(case)
        model = options.work / f"model-{options.device}-{config}"
        make_model(model, small_model(config, options.device), options.device)
        yield _run(case, {"model": str(model), "data.source": str(problems)}, deployments, options, end)


def _run(
    case: str, inputs: Mapping[str, str], deployments: Deployments, options: argparse.Namespace, end: float
) -> Row:
    """Start a deployment, wait for its end, and report its results."""
    (config, grid), name = parts_of(case), case.replace("/", "-")
    began, runs, settings = time.monotonic(), options.work / "runs", small_settings(options.device, grid)
    # A run that was cut would be continued; here it is timed from its beginning.
    shutil.rmtree(runs / name, ignore_errors=True)
    parameters = {"run": name, "steps": options.steps, "overrides": {**inputs, **settings, "runs": str(runs)}}
    code = deployments.run(config, name, parameters, end)
    state = deployments.last_state(name)
    row = {
        "kind": "deployment",
        "config": config,
        "grid": grid,
        "device": options.device,
        "overrides": {**dict.fromkeys(inputs, "a small one"), **settings},
        "state": state["type"],
        "message": "cut by the time of its command" if state["type"] == "RUNNING" else state["message"],
        "exit_code": code,
        "seconds": time.monotonic() - began,
        **provenance(),
        **run_facts(runs / name),
    }
    if state["type"] != "COMPLETED":
        row["said"] = deployments.said(name)[-_SHOWN:]
        print(row["said"], flush=True)
    return row


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Deployments of the published models, small, on a GPU or several.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of models, runs and servers (default: that of the results)")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call (default 540)")
    parser.add_argument("--steps", type=int, default=2, help="of each run (default 2)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    options.names, options.work = options.names or list(MODELS), (options.work or options.out).absolute()
    if unknown := {*options.names} - {*CASES}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(CASES)}")
    return options


def deployment_table(rows: Sequence[Row]) -> str:
    """Outcome of deployments of small models, their error, and the seconds of their tasks in all steps."""
    tasks = ("rollout", "logprobs", "train", "sync")
    lines = []
    for row in rows:
        seconds = ", ".join(f"{row['task_seconds'][task]:.1f}" for task in tasks)
        state = "completed" if row["state"] == "COMPLETED" else row["message"]
        lines.append([row["config"], row["grid"], str(row["steps"]), state, f"{max(row['tmpe']):.4f}", seconds])
    return table(["deployment", "grid", "steps", "ended", "error, largest", f"{', '.join(tasks)}, s"], lines)


if __name__ == "__main__":
    sys.exit(main())
