"""Seconds from the start of a process to the first token that an 8B policy generates: without kernels, and with them.

    python -m benchmarks.cold_start --out FOLDER --rows FILE --model qwen3-8b --layers 36
    python -m benchmarks.cold_start --out FOLDER --tiny                                  a rehearsal on a CPU
    python -m benchmarks.cold_start --out FOLDER --cases empty kept --set rollout.engine=sglang --set \
      'rollout.sglang={model: aligned, page_size: 64, kv_cache_gib: 14.5, mem_fraction_static: 0.3, sleep: true}'

Each case is a process of its own, which does what `fp8-grpo run` does up to then: it compiles, reads the checkpoint of
random weights, builds engine and trainer, calibrates and sends the policy. `empty` has a home folder without anything
in it, so that no library finds what it kept; `kept` is the same once more. `steps` is `fp8-grpo run` in that home,
whose steps must compile nothing. A case that is not done after --seconds is ended, and its row is of kind `error`.

Packages have bytecode where pip installed them; a tree that was unpacked has it after `python -m compileall -q TREE`.
`bytecode` of a row is the share of modules that had it.

Other rows of FILE stay. The prediction that a row holds was written before.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.grpo_8gpu import REHEARSAL, SHAPES
from benchmarks.harness import ROOT, Row, provenance, table, training_command, write_rows
from benchmarks.large_ledger import architecture, make_model
from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView

RESULT = "cold_start"
PREDICTION = Path(__file__).with_name(f"{RESULT}_prediction.json")
CASES = ("empty", "kept", "steps")
_KEYS = ("model", "layers", "engine", "case", "tiny")
_VARIABLES = (
    "PYTHONDONTWRITEBYTECODE",
    "DG_JIT_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
)
_SETTINGS = {
    "data.source": "chain",
    "reward.verifier": "benchmarks.random_reward:score",
    "rollout.prompts_per_step": 24,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 256,
    "rollout.vllm.kv_cache_gib": 14.5,
    "evaluation": {"every": 1_000_000, "prompts": 1},
    "checkpoint.every": 1_000_000,
    "tracking.sample_completions": 0,
}
_POLL_SECONDS = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases in order; returns 0 when all are measured and no step has compiled, else 1."""
    options = _options(arguments)
    out = options.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    arch = _architecture(options)
    model = out / f"model-{options.model}-{arch.num_layers}{'-tiny' if options.tiny else ''}"
    make_model(model, arch, "cpu" if options.tiny else "cuda")
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else []
    predictions = json.loads(options.predict.read_text()) if options.predict.exists() else []
    engine, good = load_config(SHAPES[options.model][0], _settings(model, options)).rollout.engine, True
    for case in options.cases:
        row = _measured(case, model, out, options)
        row |= {"model": options.model, "layers": arch.num_layers, "engine": engine, "case": case, "tiny": options.tiny}
        same = [each for each in predictions if all(each[key] == row[key] for key in ("case", "model", "engine"))]
        row["predicted"] = None if options.tiny or not same else same[0]["predicted"]
        good = good and row["kind"] == RESULT and not sum(row.get("compiled_by_step", ()))
        rows = [
            *(each for each in rows if any(each.get(key) != row.get(key) for key in _KEYS)),
            {**provenance(), **row},
        ]
        write_rows(options.rows, rows)
    print(cold_start_table([row for row in rows if row["kind"] == RESULT]), flush=True)
    return 0 if good else 1


def _measured(case: str, model: Path, out: Path, options: argparse.Namespace) -> Row:
    """The row of a case, or one of kind `error`."""
    home, log = out / f"home-{model.name}", out / "logs" / f"{case}.log"
    if case == "empty" and home.exists():
        home.rename(out / f"{home.name}-{time.time_ns()}")
    home.mkdir(exist_ok=True)
    name = f"{case}-{time.time_ns()}"
    settings = [*_settings(model, options), f"runs={out / 'runs'}", f"run={name}"]
    if case == "steps":
        command = training_command(SHAPES[options.model][0], [*settings, f"steps={options.steps + 1}"])
    else:
        asked = out / f"{case}.json"
        asked.write_text(json.dumps({"config": SHAPES[options.model][0], "settings": settings, "began": time.time()}))
        command = [sys.executable, "-m", "benchmarks.cold_start_worker", str(asked)]
    ledger = out / "runs" / name / LEDGER
    code = _run(command, home, log, options, lambda: case == "steps" and _last_step(ledger) >= options.steps)
    if case == "steps" and _last_step(ledger) >= options.steps:
        counted = LedgerView.read(ledger).steps()
        return {"kind": RESULT, "compiled_by_step": [counted[i].compiled or 0 for i in range(1, options.steps + 1)]}
    result = out / f"{case}.result.json"
    if code == 0 and result.exists():
        found: Row = json.loads(result.read_text())
        result.unlink()
        return {"kind": RESULT, **found}
    return {"kind": "error", "error": f"exit code {code}; {log.read_text(errors='replace')[-2000:]}"}


def _run(
    command: Sequence[str], home: Path, log: Path, options: argparse.Namespace, reached: Callable[[], bool]
) -> int:
    """Run a process with its own home until it ends, `reached` is true or time is up; then all of it is killed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    environment = inherited | {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
    end = time.monotonic() + options.seconds
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None and not reached() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _last_step(ledger: Path) -> int:
    return (LedgerView.read(ledger).last_step() or START) if ledger.exists() else START


def cold_start_table(rows: Sequence[Row]) -> str:
    """One line a case: seconds to the first token beside the prediction, by part, and kernels."""
    return table(
        ("model", "engine", "kernels", "first token, s", "predicted", "parts, s", "kernels", "compiled in steps"),
        [
            (
                row["model"],
                row["engine"],
                row["case"],
                f"{row['first_token_seconds']:.1f}" if "first_token_seconds" in row else "",
                "" if row["predicted"] is None else str(row["predicted"].get("first_token_seconds", "")),
                ", ".join(f"{part} {seconds:.1f}" for part, seconds in row.get("seconds", {}).items()),
                str(row.get("kernels", "")),
                ", ".join(map(str, row.get("compiled_by_step", ()))),
            )
            for row in rows
        ],
    )


def _architecture(options: argparse.Namespace) -> Architecture:
    if options.tiny:
        return architecture("cpu", 2)
    return replace(SHAPES[options.model][1], num_layers=options.layers)


def _settings(model: Path, options: argparse.Namespace) -> list[str]:
    small = {**REHEARSAL.settings, "rollout.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8}
    settings = _SETTINGS | (small if options.tiny else {})
    return [f"model={model}", *(f"{key}={json.dumps(value)}" for key, value in settings.items()), *options.overrides]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cold_start"), help="folder of model, homes, runs and logs")
    parser.add_argument("--rows", type=Path, help="file that the rows are added to (default FOLDER/cold_start.json)")
    parser.add_argument("--predict", type=Path, default=PREDICTION, help="file of predictions written before")
    parser.add_argument("--model", choices=tuple(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--steps", type=int, default=2, help="of `fp8-grpo run` that are to compile nothing (default 2)"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="of each case (default 240)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with the embedded engine, on a CPU")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    options.rows = options.rows or options.out / f"{RESULT}.json"
    return options


if __name__ == "__main__":
    sys.exit(main())
