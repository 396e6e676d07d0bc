"""TRL in the race: `GRPOTrainer` with vLLM in its process, asleep while it trains, as documented for one GPU.

    python -m benchmarks.peers.trl --model 8b --case fixed --steps 4 --out FOLDER

Weights and moments are BF16: with those of FP32, its default, 8 billion parameters leave no room for vLLM. It pads
sequences and packs none. Hub kernels need a network; Liger's do the same.
"""

import json
import os
import sys
import time
from collections import defaultdict
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.peers import reward
from benchmarks.peers.load import Process, Race, lines, main, prompts

# Sequences of a pass: of the longest tail, four have room at 8B.
_BATCH = {"fixed": 8, "tail": 4}
_FLASH = "flash_attention_2"
MISSING = [] if find_spec("flash_attn") else ["flash attention: torch's own instead"]


def arguments(race: Race, folder: Path) -> Row:
    """What `GRPOConfig` takes."""
    load, cpu = race.load, race.model == "tiny"
    batch = _BATCH[race.case]
    model = {"dtype": "float32" if cpu else "bfloat16", "attn_implementation": "sdpa" if cpu or MISSING else _FLASH}
    found: Row = {
        **{"output_dir": str(folder.with_name("checkpoints")), "max_steps": race.steps, "report_to": "none"},
        **{"save_strategy": "steps" if race.checkpoint else "no", "save_steps": race.checkpoint or 1},
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": load.completions // batch},
        **{"num_generations": load.group, "max_completion_length": load.longest, "temperature": 1.0},
        **{"learning_rate": 1e-6, "lr_scheduler_type": "constant", "beta": 0.0, "loss_type": "dapo"},
        **{"optim": "adamw_torch" if cpu else "adamw_torch_fused", "bf16": not cpu, "use_cpu": cpu},
        **{"gradient_checkpointing": race.model != "1.5b", "logging_steps": 1, "shuffle_dataset": False},
        **{"gradient_checkpointing_kwargs": {"use_reentrant": False}, "use_liger_kernel": not cpu},
        "model_init_kwargs": model,
    }
    if not cpu:
        found |= {
            **{"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
            **{"vllm_gpu_memory_utilization": 0.38, "vllm_max_model_length": load.context},
            **{"vllm_importance_sampling_correction": race.logprobs == "pass"},
            "generation_kwargs": {"ignore_eos": load.mean is None},
        }
    return found | {key: json.loads(value) for key, value in (each.split("=", 1) for each in race.overrides)}


def train(given: dict[str, Any]) -> None:
    """Train, in a process of its own; each step is a line of the file `records`."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    seconds, began = defaultdict[str, float](float), [0.0]

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.clear()
            began[0] = time.perf_counter()

        def on_log(self, _: Any, state: Any, __: Any, logs: Row, **___: Any) -> None:
            if "completions/mean_length" not in logs:
                return
            own = {name.rpartition(".")[2]: value for name, value in seconds.items()}
            parts = {"generate": seconds["GRPOTrainer.vLLM.generate"], "sync": own.get("sync_weights", 0.0)}
            parts |= {"score": own["_calculate_rewards"]}
            parts |= {"update": time.perf_counter() - began[0] - own["_prepare_inputs"]}
            record = {"step": state.global_step, "generated": logs["completions/mean_length"] * given["completions"]}
            logged = {key: value for key, value in logs.items() if key.startswith("sampling")}
            with open(given["records"], "a") as file:
                file.write(json.dumps(record | {"parts": parts, "logged": logged}) + "\n")

    def note(context: Any, duration: float) -> None:
        seconds[context.name] += duration

    # Its own timers, which otherwise go to a tracker.
    ProfilingContext._log_metrics = note
    trainer = GRPOTrainer(
        model=given["model"],
        reward_funcs=reward.trl,
        args=GRPOConfig(**given["arguments"]),
        train_dataset=Dataset.from_list([{"prompt": text, "number": number} for number, text in given["prompts"]]),
        callbacks=[Recorder()],
    )
    trainer.train(resume_from_checkpoint=any(Path(given["arguments"]["output_dir"]).glob("checkpoint-*")))


def process(race: Race, folder: Path) -> Process:
    records, asked = folder.with_suffix(".jsonl"), folder.with_suffix(".json")
    given = {"model": str(race.policy), "prompts": [*prompts(race)], "completions": race.load.completions}
    asked.write_text(json.dumps(given | {"records": str(records), "arguments": arguments(race, folder)}))

    def weights() -> str | None:
        last = race.folder / f"checkpoints/checkpoint-{race.steps}"
        files = [file.read_bytes() for file in sorted(last.glob("model*.safetensors"))]
        return sha256(b"".join(files)).hexdigest() if files else None

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    alone |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, "-m", "benchmarks.peers.trl", "--inside", str(asked)]
    return Process(command, alone, lambda: len(lines(records)), lambda: lines(records), weights)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    if sys.argv[1:2] == ["--inside"]:
        train(json.loads(Path(sys.argv[2]).read_text()))
        sys.exit()
    sys.exit(main("trl", ["bf16"], process, {"missing": MISSING}))
