"""Configurations of the trainers of a warm start and of a teacher."""

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.run import RunConfig
from fp8core.config.training import TrainingConfig


def sft_training(config: RunConfig) -> TrainingConfig:
    """Repeatable, so that runs of all trainers start from one policy. Kept is what fits it into memory."""
    names = ("device", "packed", "tokens_per_pass", "context_parallel", "activation_checkpointing")
    memory = dict.fromkeys(names, True)
    settings = config.training.model_dump(include={**memory, "optimiser": {"state"}})
    return TrainingConfig.model_validate(settings)


def sft_config(config: RunConfig) -> RunConfig:
    """All weights in BF16 whatever the contract, so that all start from one policy."""
    bf16 = {"linear": "bf16", "kv_cache": "bf16"}
    contract = PrecisionContract.model_validate({"rollout": bf16, "training": bf16, "rounding_points": "kernels"})
    return config.model_copy(update={"precision": contract, "training": sft_training(config)})


def teacher_config(config: RunConfig) -> RunConfig:
    """In BF16, or in FP32 where the run trains so. Its unpacked passes are as large as the run's."""
    linear = "fp32" if config.precision.training.linear == "fp32" else "bf16"
    side = {"linear": linear, "kv_cache": linear}
    contract = PrecisionContract.model_validate({"rollout": side, "training": side, "rounding_points": "kernels"})
    training = sft_training(config).model_copy(update={"micro_batch": config.training.micro_batch})
    update = {"precision": contract, "training": training, "loss": LossConfig()}
    return config.model_copy(update=update)
