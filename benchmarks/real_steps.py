"""Seconds of a step of `real`, SmolLM2-135M in exact FP8 on a CPU, beside the same work in plain FP32.

    python -m benchmarks.real_checkpoint build/real
    python -m benchmarks.real_steps

Writes benchmarks/results/real_steps.json and prints a table of docs/results/real.md. Run it on an idle machine; it
takes some five minutes on two cores.

- `exact`: `fp8-grpo run real`, whole steps through the flow, by part. The first step of the process is left out.
- `plain`: `transformers` in FP32 on as many threads, without a flow and without files: 12 tokens for each of 16
  completions with its cache of keys and values, one forward and backward of all of them, and AdamW. Medians of five
  after one that is not counted.

Predicted before the first measurement: exact 13 s, plain 4 s. The bound is 15 s a step of 16 completions of 12 tokens.
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import RESULTS, ROOT, Row, provenance, table, training_command, write_rows
from benchmarks.real_checkpoint import problems
from benchmarks.small_hopper import step_ledger_row
from fp8core.report.run_data import read_run
from fp8core.store.metrics import TMPE, series

MODEL, THREADS, PROMPTS, GROUP, TOKENS, REPEATS = "SmolLM2-135M-Instruct", 2, 4, 4, 12, 5
BOUND_SECONDS = 15.0


def main() -> None:
    about = {"kind": "real_step", "model": MODEL, "completions": PROMPTS * GROUP, "tokens": TOKENS, "threads": THREADS}
    rows = [
        {**about, "form": "exact", **exact(steps=8), "bound_seconds": BOUND_SECONDS, **provenance()},
        {**about, "form": "plain", **plain(ROOT / "build" / "real" / "model"), **provenance()},
    ]
    write_rows(RESULTS / "real_steps.json", rows)
    print(step_table(rows))


def exact(steps: int) -> Row:
    """Mean seconds of a step of the run, by part, and its largest error."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"runs={folder}", "run=steps", f"steps={steps}", f"threads={THREADS}", "evaluation.every=100"]
        settings += ["checkpoint.every=100", f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}"]
        subprocess.run(training_command("real", settings), cwd=ROOT, check=True)
        run = read_run(Path(folder) / "steps", "real")
        row = step_ledger_row(run, "real", "")
        assert row is not None, "the run has no step within one process"
        seconds, (_, tmpe) = row["seconds"], series(run.history, TMPE)
        return {
            "steps": row["steps"],
            "seconds": seconds["wall"],
            "parts": seconds,
            "tmpe": max(tmpe),
        }


def plain(folder: Path) -> Row:
    """Median seconds of generation, forward and backward, and the update, in FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-6)
    # Of one length, so that nothing is padded.
    asked = [tokenizer(question)["input_ids"] for question, _ in problems(PROMPTS, 30)]
    shortest = min(map(len, asked))
    prompts = torch.tensor([tokens[:shortest] for tokens in asked]).repeat_interleave(GROUP, 0)
    found = [step(model, optimiser, prompts) for _ in range(REPEATS + 1)][1:]
    parts = {name: median(each[name] for each in found) for name in found[0]}
    return {"steps": REPEATS, "seconds": median(sum(each.values()) for each in found), "parts": parts}


def step(model: Any, optimiser: torch.optim.Optimizer, prompts: torch.Tensor) -> dict[str, float]:
    """Seconds of one step by part; `prompts` is [completions, tokens]."""
    seconds: dict[str, float] = {}
    with timed(seconds, "rollout"), torch.no_grad():
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
        )
    with timed(seconds, "train"):
        logprobs = model(whole).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
        written = logprobs.gather(-1, whole[:, prompts.shape[1] :, None])
        written.mean().neg().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return seconds


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block takes."""
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def step_table(rows: Sequence[Row]) -> str:
    """Seconds of a step: ours beside plain FP32."""
    words = {"exact": "exact FP8, whole steps of the flow", "plain": "`transformers` in FP32, no flow, no files"}
    tasks = ("rollout", "train", "sync")
    return table(
        ["16 completions of 12 tokens, two threads", "seconds", *tasks, "rest", "error"],
        [
            [
                words[row["form"]],
                f"{row['seconds']:.1f}",
                *(f"{row['parts'].get(task, 0.0):.1f}" for task in tasks),
                f"{row['seconds'] - sum(row['parts'].get(task, 0.0) for task in tasks):.1f}",
                "1 exactly" if row.get("tmpe") == 1 else "",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
