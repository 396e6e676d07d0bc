"""What the trainer for packed sequences can compute: checked before anything is loaded."""

from fp8core.config.precision import PrecisionContract
from fp8core.config.run import TrainingConfig
from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, parameter_shapes
from fp8core.models.formats import training_formats
from fp8core.models.weights import is_linear
from fp8core.numerics.decode_attention import HEAD_DIM, LARGEST_GROUP
from fp8core.numerics.e4m3 import TILE

_SETTING = "training.packed"
_POINTS = ("stepwise", "kernels")


def required_environment(training: TrainingConfig) -> dict[str, str]:
    """What cuBLAS reads when the first product is taken; torch's deterministic mode refuses a product without it."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if training.packs_on_gpu and training.deterministic else {}


def check_contract_fits(contract: PrecisionContract, device: str, platform: str) -> None:
    """Refuse what no kernel of this trainer computes.

    Args:
        contract: formats of both sides.
        device: `cpu`, where references stand in, or `cuda`.
        platform: see `config.capability.this_platform`.

    Raises:
        UserError: naming the setting and what to do.
    """
    training = contract.training
    if device == "cuda" and platform == "cpu":
        raise UserError("training.device=cuda: torch sees no GPU here; set it to cpu")
    if training.linear == "fp32":
        raise UserError(f"{_SETTING} with precision.training.linear=fp32: set it to bf16 or fp8_block")
    if training.backward_format != training.linear:
        raise UserError(
            f"{_SETTING} with precision.training.backward={training.backward_format}: its backward has the format of "
            f"the forward ({training.linear}); set backward to null"
        )
    if contract.rounding_points not in _POINTS:
        raise UserError(
            f"{_SETTING} with precision.rounding_points={contract.rounding_points}: its kernels have the points "
            f"`kernels`; set it to {' or '.join(_POINTS)}"
        )


def check_architecture_fits(arch: Architecture, contract: PrecisionContract, device: str) -> None:
    """Refuse a model that this trainer has not, or on `cuda` no kernel for.

    Raises:
        UserError: naming what the model has.
    """
    if arch.sparse_layers:
        raise UserError(
            f"{_SETTING}: the model has experts, which this trainer does not; set training.trainer=megatron"
        )
    if device == "cpu":
        return
    formats = training_formats(contract, arch.num_layers).stored_names()
    for name, shape in parameter_shapes(arch).items():
        if is_linear(name) and formats.of(name) == "fp8_block" and any(size % TILE for size in shape):
            raise UserError(
                f"{_SETTING} with precision.training.linear=fp8_block: {name} is {list(shape)}; both sides must be "
                f"multiples of {TILE}"
            )
    group = arch.num_heads // arch.num_kv_heads
    if contract.training.kv_cache == "fp8" and (arch.head_dim != HEAD_DIM or group > LARGEST_GROUP):
        raise UserError(
            f"{_SETTING} with precision.training.kv_cache=fp8: the model has head_dim={arch.head_dim} and {group} "
            f"query heads a KV head; the kernel takes head_dim={HEAD_DIM} and at most {LARGEST_GROUP}"
        )
