"""verl in the race: FSDP2 and vLLM on one GPU, with rollouts in BF16 or in its FP8 (`rollout.quantization=fp8`).

    python -m benchmarks.peers.verl --model 8b --case fixed --precision fp8 --steps 4 --out FOLDER

Sequences are packed (`use_remove_padding`), heads and losses fused. Weights and moments are BF16, as TRL's: in FP32 the
moments of 8 billion parameters go to the host's memory in each step. `--logprobs none` takes those of the rollout
(`bypass_mode`); `pass` computes them and corrects by tokens, which its documentation recommends for FP8.
"""

import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pyarrow
from pyarrow import parquet

from benchmarks.harness import Row
from benchmarks.peers.load import Process, Race, lines, main, prompts

_PARTS = {
    "generate": ("gen",),
    "score": ("reward", "adv"),
    "logprobs": ("old_log_prob",),
    "update": ("update_actor",),
    "sync": ("update_weights",),
}
_LOGGED = ("training/rollout", "rollout_corr", "actor/ppo_kl")
# Tokens of a pass; the largest batch that has room beside the moments.
_PASS = {"8b": 18_432, "1.5b": 36_864, "tiny": 512}


def settings(race: Race, data: Path) -> Iterator[str]:
    """What differs from verl's defaults."""
    load, actor, rollout = race.load, "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens = max(_PASS[race.model], load.context)
    yield from (f"data.train_files={data}", f"data.val_files={data}", "data.val_max_samples=2", "data.shuffle=false")
    yield from (f"data.train_batch_size={load.prompts}", f"data.max_prompt_length={load.prompt}")
    yield from (f"data.max_response_length={load.longest}", "data.dataloader_num_workers=1")
    yield from ("algorithm.adv_estimator=grpo", f"{actor}.use_kl_loss=false", f"{actor}.entropy_coeff=0")
    if race.logprobs == "none":
        yield "algorithm.rollout_correction.bypass_mode=true"
    else:
        yield from (
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
        )
    yield f"actor_rollout_ref.model.path={race.policy}"
    yield from (
        f"actor_rollout_ref.model.{name}=true" for name in ("use_remove_padding", "use_liger", "use_fused_kernels")
    )
    yield "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton"
    yield f"actor_rollout_ref.model.enable_gradient_checkpointing={str(race.model != '1.5b').lower()}"
    yield from (f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.model_dtype=bf16", f"{actor}.use_dynamic_bsz=true")
    yield from (f"{actor}.ppo_mini_batch_size={load.prompts}", f"{actor}.ppo_max_token_len_per_gpu={tokens}")
    yield from (f"{actor}.optim.lr=1e-6", f"{actor}.optim.override_optimizer_config={{fused:true}}")
    # On one GPU there is nothing to gather again.
    yield f"{actor}.fsdp_config.reshard_after_forward=false"
    yield from (f"{rollout}.name=vllm", f"{rollout}.n={load.group}", f"{rollout}.tensor_model_parallel_size=1")
    yield from (f"{rollout}.max_model_len={load.context}", f"{rollout}.gpu_memory_utilization=0.45")
    yield from (f"{rollout}.ignore_eos={str(load.mean is None).lower()}", f"{rollout}.agent.num_workers=4")
    yield from [f"{rollout}.quantization=fp8"] * (race.precision == "fp8")
    yield from ("reward.num_workers=2", "transfer_queue.backend.SimpleStorage.num_data_storage_units=2")
    yield from (f"reward.custom_reward_function.path={Path(__file__).with_name('reward.py')}",)
    yield "reward.custom_reward_function.name=verl"
    yield from ("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[console,file]")
    yield from (f"trainer.total_training_steps={race.steps}", "trainer.val_before_train=false", "trainer.test_freq=-1")
    yield from (
        f"trainer.save_freq={race.checkpoint or -1}",
        f"trainer.default_local_dir={race.folder / 'checkpoints'}",
    )
    # Its actors ask for more processors than a small host has.
    yield "ray_kwargs.ray_init.num_cpus=32"
    yield from race.overrides


def process(race: Race, folder: Path) -> Process:
    """`main_ppo`; a step is a line of its file logger."""
    data, log = race.folder / "prompts.parquet", folder.with_suffix(".jsonl")
    rows = [
        {
            **{"data_source": "race", "prompt": [{"role": "user", "content": text}], "ability": "none"},
            **{"reward_model": {"style": "rule", "ground_truth": number}, "extra_info": {"index": int(number)}},
        }
        for number, text in prompts(race)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), data)

    def steps() -> list[Row]:
        return [each for each in lines(log) if "timing_s/step" in each["data"]]

    def records() -> list[Row]:
        return [record(race, each["step"], each["data"]) for each in steps()]

    def weights() -> str | None:
        last = sorted((race.folder / f"checkpoints/global_step_{race.steps}/actor").glob("model_*.pt"))
        return sha256(b"".join(file.read_bytes() for file in last)).hexdigest() if last else None

    variables = {"VERL_FILE_LOGGER_PATH": str(log), "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(race, data)]
    return Process(command, variables, lambda: len(steps()), records, weights)


def record(race: Race, step: int, data: Row) -> Row:
    """A step from what verl logs of it."""
    parts = {part: sum(data.get(f"timing_s/{name}", 0.0) for name in names) for part, names in _PARTS.items()}
    logged = {key: value for key, value in data.items() if key.startswith(_LOGGED)}
    generated = data["response_length/mean"] * race.load.completions
    return {"step": step, "generated": generated, "parts": parts, "logged": logged}


if __name__ == "__main__":
    sys.exit(main("verl", ["bf16", "fp8"], process, {"missing": []}))
