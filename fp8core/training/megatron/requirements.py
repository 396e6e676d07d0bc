"""What the Megatron trainer asks of a machine and of a contract, checked before anything is loaded.

Megatron is not imported here, nor is Transformer Engine, which reads its environment when it is.
"""

from importlib.util import find_spec

from fp8core.config.run import RunConfig
from fp8core.errors import UserError


def check_requirements(config: RunConfig, platform: str) -> None:
    """Refuse what is not installed, and formats that Megatron does not compute on this platform.

    Args:
        config: of a run with `training.trainer: megatron`.
        platform: as `config.capability.this_platform` names it.

    Raises:
        UserError: the package or the setting, and what to do.
    """
    packages = ["megatron.core"] if platform == "cpu" else ["megatron.core", "transformer_engine"]
    for package in packages:
        if not _installed(package):
            raise UserError(f"training.trainer=megatron: {package} is not installed (pip install 'fp8-grpo[megatron]')")
    contract = config.precision.training
    if platform == "cpu":
        _check_cpu(config)
    elif contract.linear == "fp32":
        raise UserError("precision.training.linear=fp32: Megatron trains in FP32 on a CPU alone; set it to bf16")
    if contract.kv_cache == "fp8":
        raise UserError(
            "precision.training.kv_cache=fp8: Megatron's attention computes in BF16; set it to bf16, and let "
            "`correction` act on what the rollout's FP8 cache changes"
        )
    if contract.backward_format != contract.linear:
        raise UserError(
            f"precision.training.backward={contract.backward_format}: Transformer Engine multiplies backward in the "
            f"format of the forward; set it to null or to {contract.linear}"
        )


def check_gpus(config: RunConfig, platform: str, here: int) -> None:
    """Raises UserError where more GPUs are to train than are `here`; without any, processes share the CPU."""
    gpus = config.training.megatron.gpus
    if platform != "cpu" and gpus > here:
        raise UserError(f"training.megatron.gpus={gpus}: this machine has {here}")


def _check_cpu(config: RunConfig) -> None:
    if config.precision.training.linear != "fp32":
        raise UserError(
            f"precision.training.linear={config.precision.training.linear}: without a GPU Megatron trains in FP32 "
            "alone; set linear and kv_cache to fp32, or training.trainer to torch"
        )
    megatron = config.training.megatron
    only_here = {"recompute": "none", "sequence_parallel": False, "expert_parallel": 1, "pipeline_parallel": 1}
    for name, value in only_here.items():
        if getattr(megatron, name) != value:
            raise UserError(f"training.megatron.{name}: Megatron does that on a GPU alone; set it to {value}")


def _installed(package: str) -> bool:
    # The parent is looked for first: finding a module below one that is missing raises.
    parts = package.split(".")
    return all(find_spec(".".join(parts[:end])) is not None for end in range(1, len(parts) + 1))


def required_environment(config: RunConfig) -> dict[str, str]:
    """What must stand in the environment before Transformer Engine is imported."""
    return {
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if config.precision.scale_rule == "fp32" else "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if config.training.deterministic else "1",
    }


def suggested_environment(config: RunConfig) -> dict[str, str]:
    """What makes it faster: one queue keeps communication behind the GEMM that it shall overlap with."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if config.training.megatron.tensor_parallel > 1 else {}
