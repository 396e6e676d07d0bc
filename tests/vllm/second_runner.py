"""vLLM's second runner on a CPU, in a process of its own: Triton interprets the kernels of its inputs and sampler.

vLLM for CPUs takes this runner where Triton compiles for CPUs. No build here does, so its place in Triton's registry is
taken by one that nothing asks. The forward is vLLM's own in FP32, whose rounding is far below what decides a token.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.families.config_json import architecture_to_hf

_VARIABLES = {
    **{"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
}
DRAFT_TOKENS = 4
LARGEST_BATCH = 24
STOPS = list(range(12))


def compute(folder: Path, arch: Architecture) -> None:
    """Write what engines without and with drafts generate, as `generations.pt`; with drafts twice, the same again."""
    os.environ |= _VARIABLES
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class Speculating(Qwen3ForCausalLM):
        judge: Any = None

        @staticmethod
        def get_model_state_cls() -> type:
            from fp8core.rollout.vllm.speculation import AlignedState

            return AlignedState

    ModelRegistry.register_model("Speculating", Speculating)
    config = architecture_to_hf(arch, bos_id=None, eos_ids=[0], pad_id=None, dtype="float32")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Speculating"]}))
    save_file({name: w * 2 for name, w in initial_weights(arch, seed=0).items()}, folder / "model.safetensors")
    torch.save([_generations(folder, drafts) for drafts in (0, DRAFT_TOKENS)], folder / "generations.pt")


def _generations(folder: Path, draft_tokens: int) -> dict[str, Any]:
    """Tokens, log-probs and reasons of each rollout, its steps, and the counts of drafts."""
    from vllm import EngineArgs, LLMEngine

    from fp8core.rollout.vllm.settings import draft_arguments

    # Prompts come in parts, and requests lose their blocks to others.
    sizes = {"max_num_seqs": LARGEST_BATCH, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 10 << 15}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=160,
            block_size=32,
            enforce_eager=True,
            distributed_executor_backend="uni",
            logprobs_mode="processed_logprobs",
            **sizes,
            **draft_arguments(draft_tokens),
        ),
        enable_multiprocessing=False,
    )
    model = engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
    found = [_rollout(engine) for _ in range(2 if draft_tokens else 1)]
    return {"found": found, "counts": model.judge.counts() if model.judge else None}


def _rollout(engine: Any) -> tuple[dict[str, Any], int]:
    """Groups of three; half of the requests come while others decode."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    waiting = list[tuple[str, list[int], SamplingParams]]()
    generator = torch.Generator().manual_seed(1)
    for group in range(4):
        prompt = torch.randint(4, 200, (5 + 20 * group,), generator=generator).tolist()
        for sample in range(3):
            parameters = SamplingParams(
                temperature=0.0 if group == 1 else 1.0,
                max_tokens=6 + 7 * group + 3 * sample,
                seed=100 * group + sample,
                stop_token_ids=STOPS,
                logprobs=0,
                ignore_eos=True,
                flat_logprobs=True,
                detokenize=False,
            )
            waiting.append((f"{group}/{sample}", prompt, parameters))
    found, steps = dict[str, Any](), 0
    while waiting or engine.has_unfinished_requests():
        for name, prompt, parameters in waiting[: 8 if steps % 5 == 0 else 0]:
            engine.add_request(name, tokens_input(prompt), parameters)
        waiting = waiting[8 if steps % 5 == 0 else 0 :]
        steps += 1
        for output in engine.step():
            if output.finished:
                (written,) = output.outputs
                assert list(written.logprobs.token_ids) == list(written.token_ids)
                found[output.request_id] = (
                    list(written.token_ids),
                    list(written.logprobs.logprobs),
                    written.finish_reason,
                )
    assert engine.reset_prefix_cache()
    return found, steps
