"""Export a run's policy in BF16 and block FP8, and score its held-out prompts in `transformers` and in vLLM.

    python -m benchmarks.export_check RUN --out FOLDER          the last step of a run (name or folder)
    python -m benchmarks.export_check RUN --out FOLDER --step 20
    python -m benchmarks.export_check RUN --out FOLDER --only fp8/vllm    what is named; rows of earlier calls stay

Each library loads each folder as any user would, in a process of its own, and answers greedily; the run's verifier
scores. FOLDER/export_check.json has a row for each: its accuracy, or why there is none. The first row is what the run
itself measured at that step, if it evaluated then. `transformers` reads FP8 by its own kernels where it has them, and
`transformers_dequantised` turns it into BF16 while loading, which every machine can.
"""

import argparse
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Row, provenance, write_rows
from benchmarks.harness import table as markdown
from benchmarks.small_hopper import run_provenance
from flows.run_lookup import description_of, find_run
from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.load import reload_config
from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem
from fp8core.evaluation.measure import heldout_problems
from fp8core.processes.variables import set_variables
from fp8core.report.run_data import read_run
from fp8core.rewards.scorer import Answer
from fp8core.rewards.verifier import build_verifier
from fp8core.rollout.vllm.requirements import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.store.metrics import HELDOUT, STEP

LOADERS = {"bf16": ("transformers", "vllm"), "fp8": ("transformers", "transformers_dequantised", "vllm")}
PAIRS = tuple((format, loader) for format, loaders in LOADERS.items() for loader in loaders)
RESULT = "export_check.json"
_CACHE_BYTES = 1 << 30

Completions = list[tuple[str, str]]
"""Text without its end of sequence, and how it ended: "stop" or "length"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a run's exports, or (--inside) answer with one of them.

    Returns 1 when a requested score is missing.
    """
    options = _options(arguments)
    if options.inside is not None:
        _answer(options.inside)
        return 0
    folder = find_run(options.run)
    run = read_run(folder, folder.name)
    config = reload_config(description_of(folder).config)
    step = max(run.view.steps) if options.step is None else options.step
    measured = {int(row[STEP]): row[HELDOUT] for row in run.history if HELDOUT in row}.get(step)
    about = {"run": folder.name, "step": step, **run_provenance(run.view), "command": provenance()["command"]}
    options.out.mkdir(parents=True, exist_ok=True)
    rows = _Rows(options.out / RESULT, about, keep=options.only is not None)
    rows.add({"format": "in training", "loader": config.rollout.engine, "accuracy": measured})
    asked = PAIRS if options.only is None else [pair for pair in PAIRS if pair in options.only]
    for format, pairs in itertools.groupby(asked, lambda pair: pair[0]):
        target = options.out.absolute() / f"{folder.name}-{step}-{format}"
        _export(folder, step, format, target)
        for _, loader in pairs:
            rows.add(_row(format, loader, target, config))
    print(table(rows.of_this_step()), flush=True)
    scored = {(row["format"], row["loader"]) for row in rows.of_this_step() if row["accuracy"] is not None}
    return int(not scored.issuperset(asked))


class _Rows:
    """Rows by run, step, format and loader, written after each addition: they survive any end of this process."""

    def __init__(self, path: Path, about: Row, keep: bool) -> None:
        """With `keep`, rows that the file has stay until they are measured again."""
        self._path, self._about = path, about
        earlier = json.loads(path.read_text()) if keep and path.exists() else []
        self._rows = {_key(row): row for row in earlier}

    def add(self, row: Row) -> None:
        """Add a row of this run and step, or replace it; runs stay in the order in which they came."""
        row = {"kind": "export", **row, **self._about}
        self._rows[_key(row)] = row
        runs = list(dict.fromkeys(key[:2] for key in self._rows))
        places = {key: (runs.index(key[:2]), _order(*key[2:])) for key in self._rows}
        self._rows = {key: self._rows[key] for key in sorted(places, key=places.__getitem__)}
        write_rows(self._path, self._rows.values())

    def of_this_step(self) -> list[Row]:
        """Rows of the run and the step that are checked."""
        return [row for row in self._rows.values() if _key(row)[:2] == (self._about["run"], self._about["step"])]


def _key(row: Row) -> tuple[str, int, str, str]:
    return row["run"], row["step"], row["format"], row["loader"]


def _order(format: str, loader: str) -> int:
    """As in a call for all; what the run itself measured is the first."""
    return PAIRS.index((format, loader)) if (format, loader) in PAIRS else -1


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = []
    for row in rows:
        accuracy = row.get("problem", "not measured") if row["accuracy"] is None else f"{row['accuracy']:.4f}"
        lines.append([row["format"], row["loader"], row.get("linears", ""), accuracy, str(row.get("prompts", ""))])
    return markdown(["export", "loaded by", "linears", "held-out accuracy", "prompts"], lines)


def _export(run: Path, step: int, format: str, target: Path) -> None:
    """Write an export, in place of one from an earlier call."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "flows.cli", "export", str(run), str(target)]
    subprocess.run([*command, "--step", str(step), "--format", format], cwd=ROOT, check=True)


def _row(format: str, loader: str, folder: Path, config: RunConfig) -> Row:
    row: Row = {"format": format, "loader": loader, "accuracy": None}
    library = loader.partition("_")[0]
    if importlib.util.find_spec(library) is None:
        return row | {"problem": f"skipped: {library} is not installed"}
    problems = heldout_problems(config)
    with tempfile.TemporaryDirectory() as place:
        job = Path(place) / "job.json"
        content = {
            "folder": str(folder),
            "format": format,
            "loader": loader,
            "questions": [problem.question for problem in problems],
            "limit": config.rollout.max_new_tokens,
            "longest": config.rollout.vllm.max_model_len,
        }
        job.write_text(json.dumps(content))
        command = [sys.executable, "-m", "benchmarks.export_check", "--inside", str(job)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            print(done.stdout[-20_000:], flush=True)
            return row | {"problem": f"failed: {(done.stdout.strip().splitlines() or ['no output'])[-1][:300]}"}
        answered = json.loads(job.with_name("answers.json").read_text())
    accuracy = _accuracy(problems, answered["completions"], config)
    return row | {"accuracy": accuracy, "prompts": len(problems), "linears": answered["linears"]}


def _accuracy(problems: Sequence[Problem], completions: Completions, config: RunConfig) -> float:
    asked = [
        Answer(problem.question, text, problem.reference, finish)
        for problem, (text, finish) in zip(problems, completions, strict=True)
    ]
    verifier = build_verifier(config.reward)
    try:
        return sum(verdict.score for verdict in verifier.verify(asked)) / len(asked)
    finally:
        verifier.close()


def _answer(path: Path) -> None:
    job = json.loads(path.read_text())
    answer = _by_vllm if job["loader"] == "vllm" else _by_transformers
    completions, linears = answer(job)
    path.with_name("answers.json").write_text(json.dumps({"completions": completions, "linears": linears}))


def _by_transformers(job: dict[str, Any]) -> tuple[Completions, str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dequantised = job["loader"] == "transformers_dequantised"
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if dequantised else {}
    tokenizer = AutoTokenizer.from_pretrained(job["folder"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.bfloat16, **how).to(device).eval()
    asked = tokenizer(job["questions"], return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    with torch.inference_mode():
        ids = model.generate(
            asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=False,
            max_new_tokens=job["limit"],
        )
    projection = model.model.layers[0].mlp.down_proj
    kind = f"{type(projection).__name__}, {str(projection.weight.dtype).removeprefix('torch.')}"
    rows = ids[:, asked["input_ids"].shape[1] :].tolist()
    return [_finished(tokenizer, row) for row in rows], kind


def _finished(tokenizer: Any, tokens: list[int]) -> tuple[str, str]:
    ended = tokenizer.eos_token_id in tokens
    kept = tokens[: tokens.index(tokenizer.eos_token_id)] if ended else tokens
    return tokenizer.decode(kept, skip_special_tokens=True), "stop" if ended else "length"


def _by_vllm(job: dict[str, Any]) -> tuple[Completions, str]:
    linear = "fp8_block" if job["format"] == "fp8" else "bf16"
    contract = PrecisionContract(rollout=SidePrecision(linear=linear, kv_cache="bf16"))
    build = find_build(this_platform())
    set_variables(required_environment(contract, VllmConfig(), build), suggested_environment(1, build))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["folder"],
        dtype="bfloat16",
        max_model_len=job["longest"],
        enforce_eager=True,
        kv_cache_memory_bytes=_CACHE_BYTES,
    )
    outputs = llm.generate(job["questions"], SamplingParams(temperature=0.0, max_tokens=job["limit"]))
    completions = [(output.outputs[0].text, str(output.outputs[0].finish_reason)) for output in outputs]
    return completions, f"{linear} by vLLM {build.version}"


def _pairs(words: str) -> list[tuple[str, str]]:
    named = {"/".join(pair): pair for pair in PAIRS}
    if unknown := [word for word in words.split(",") if word not in named]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(named)}")
    return [named[word] for word in words.split(",")]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check that a run's exports answer as the run does.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run (name or folder)")
    parser.add_argument("--out", type=Path, help="folder of the exports and the rows")
    parser.add_argument("--step", type=int, metavar="N", help="default: the last")
    parser.add_argument(
        "--only",
        action="extend",
        type=_pairs,
        metavar="FORMAT/LOADER",
        help=f"{', '.join('/'.join(pair) for pair in PAIRS)}; several with commas, or the option several times",
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is None and None in (options.run, options.out):
        parser.error("RUN and --out are needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
