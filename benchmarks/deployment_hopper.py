"""Run the deployments of the published models at reduced size on Hopper GPUs, through `prefect deployment run`.

    python -m benchmarks.deployment_hopper --out D --seconds 540                all on one GPU, one after another
    python -m benchmarks.deployment_hopper --out D --seconds 540 qwen3-moe      one of them
    python -m benchmarks.deployment_hopper --out D --seconds 540 qwen3/tp2      one of them on several GPUs
    python -m benchmarks.deployment_hopper --out D --device cpu                 a rehearsal, without vLLM and FP8

Each has a random checkpoint of its family and problems in a file. `fp8-grpo up` serves them, and each is started as
docs/operate.md says. Its parameters make it small: model, problems, batch, lengths, one GPU instead of eight. One more
is unlike a training: the verifier (`benchmarks.coin`), because random weights solve nothing and would be updated by
nothing.

No command of the environment is needed, only its Python. D/deployment.json has a row for each, written as soon as it
ends, D/logs what was said. Models, runs and the servers' data lie in --work, where they are large. A second call runs
those that are not completed.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.deployment_cases import CASES, MODELS, parts_of, small_model, small_problems, small_settings
from benchmarks.deployment_rows import Row, run_facts
from benchmarks.deployment_services import Deployments, serving
from benchmarks.random_model import make_model

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
                content = {"command": command, "rows": list(rows.values())}
                (out / RESULT).write_text(json.dumps(content, indent=1) + "\n")
                print(json.dumps({key: row.get(key) for key in _PRINTED}), flush=True)
    return 0 if all(_completed(rows, name) for name in options.names) else 1


def _case_of(row: Row) -> str:
    return str(row["config"]) if row["grid"] == "one" else f"{row['config']}/{row['grid']}"


def _completed(rows: Mapping[str, Row], name: str) -> bool:
    return rows.get(name, {}).get("state") == "COMPLETED"


def _written(path: Path) -> list[Row]:
    found: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
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
    """Start a deployment, wait for its end, and say what it left."""
    (config, grid), name = parts_of(case), case.replace("/", "-")
    began, runs, settings = time.monotonic(), options.work / "runs", small_settings(options.device, grid)
    # A run that was cut would be gone on with; here it is to be timed from its beginning.
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


if __name__ == "__main__":
    sys.exit(main())
