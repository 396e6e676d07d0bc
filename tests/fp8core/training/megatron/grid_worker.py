"""What each process of a grid does in a test: train a little on several grids, one after another, and write it down."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron_cases import FAMILIES, FP32
from pretended_gpu import pretended_gpu
from torch import distributed

from fp8core.cluster.transport import GroupRanks
from fp8core.config.loss import LossConfig
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.experts import NO_ROUTE
from fp8core.rl.objective import Objective
from fp8core.training.megatron import parallel
from fp8core.training.megatron.trainer import MegatronTrainer
from fp8core.training.ranks import Ranks

CPU = torch.device("cpu")
GRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen3", {}),
    "data of experts": ("moe", {}),
    "experts": ("moe", {"expert_parallel": 2}),
    "tensor": ("qwen3", {"tensor_parallel": 2}),
    "tensor and sequence": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_tokens": 256}),
    "tensor, sequence and experts": (
        "moe",
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "micro_batch_tokens": 256},
    ),
    "experts, computed again": ("moe_unnormalised", {"expert_parallel": 2, "recompute": "full"}),
    "data of llama, computed again": ("llama", {"recompute": "full"}),
}
GRIDS_OF_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "data, tensor, sequence and experts": (
        "moe",
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "micro_batch_tokens": 256,
            "recompute": "full",
        },
    )
}


def trainer_of(arch: Architecture, masters: Any, ranks: Ranks, **grid: Any) -> MegatronTrainer:
    """This process's part of a grid."""
    training = TrainingConfig(learning_rate=1e-3, deterministic=False, megatron={"micro_batch_tokens": 128, **grid})
    # With entropy in the loss, whose gradient the parts of a head that is cut over the vocabulary must agree on.
    objective = Objective(LossConfig(entropy=0.3, router={"load_balancing": 0.5, "z": 0.05}), CorrectionConfig())
    return MegatronTrainer(arch, masters, FP32, training, objective, CPU, ranks)


def train(arch: Architecture, masters: Any, batch: Any, ranks: Ranks, folder: Path, **grid: Any) -> dict[str, Any]:
    """Two updates with a checkpoint between them, on this process's part of a grid; then with experts given."""
    trainer, forced = trainer_of(arch, masters, ranks, **grid), replayed(batch, arch)
    scored = trainer.logprobs(batch.sequences, 0.9, ())
    first = trainer.step(batch, 0.9, ())
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    distributed.barrier()
    second = trainer.step(batch, 0.9, ())
    trainer.load(folder)
    found = {
        "logprobs": scored.logprobs,
        "amax": [vars(layer) for layer in scored.statistics.amax()],
        "steps": [vars(first), vars(second)],
        "again": vars(trainer.step(batch, 0.9, ())),
        "masters": trainer.masters,
        "replayed": vars(trainer.step(forced, 0.9, ())),
    }
    # Of more copies of the model each holds the gradients of its own rows.
    if parallel.data_group().size() == 1:
        trainer._accumulate(trainer._objective.corrected(forced)[0], 0.9, ())
        trainer._optimiser.finish()
        own = {name: parameter.main_grad for name, parameter in trainer._policy.model.named_parameters()}
        found["gradients"] = {name: each.clone() for name, each in trainer._policy.whole(own).items()}
        trainer._drop_gradients()
    trainer.close()
    return found


def replayed(batch: Any, arch: Architecture) -> Any:
    """The same with experts that no router would choose, but for every third token; of a dense policy as it is."""
    if not arch.sparse_layers:
        return batch
    sequences, per_token = batch.sequences, arch.experts.per_token
    shape = (*sequences.tokens.shape, len(arch.sparse_layers), arch.experts.count)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7)).argsort(-1)[..., :per_token]
    own = (sequences.tokens % 3 == 0) | ~sequences.valid
    experts = torch.where(own[..., None, None], NO_ROUTE, drawn.sort(-1).values).short()
    return replace(batch, sequences=replace(sequences, experts=experts))


def work(
    rank: int, port: int, folder: str, policies: dict[str, tuple[Architecture, Any]], batch: Any, count: int
) -> None:
    """A process of so many: every grid of them, the first process writes what came out."""
    torch.set_num_threads(1)
    ranks = GroupRanks("127.0.0.1", port, rank, count)
    with pretended_gpu():
        for number, (name, (family, grid)) in enumerate(grids(count).items()):
            place = Path(folder) / str(number)
            place.mkdir(exist_ok=True)
            found = train(*policies[family], batch, ranks, place / "state", **grid)
            parallel_state.destroy_model_parallel()
            if rank == 0:
                torch.save(found, place / "found.pt")
                print(name, flush=True)


def grids(count: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Those of so many processes: a family and how it is spread, by name."""
    return {2: GRIDS, 4: GRIDS_OF_FOUR}[count]


def families_used() -> list[str]:
    """Of all grids."""
    used = {family for count in (2, 4) for family, _ in grids(count).values()}
    return [family for family in FAMILIES if family in used]
