"""Settings of the cluster: speed and memory."""

from typing import Literal

from pydantic import Field

from fp8core.config.section import Section


class ClusterConfig(Section):
    """Processes of engines and trainer ranks. One of each, colocated, without an address, lie in the run's process."""

    address: str | None = Field(
        None,
        pattern=r"^(auto|[^\s:/@]+:\d{1,5})$",
        description="Ray cluster: HOST:PORT of its head, or auto; null starts one here if it is needed.",
    )
    placement: Literal["colocated", "separate"] = Field(
        "colocated", description="colocated: rank and engine share a GPU."
    )
    engines: int = Field(1, ge=1, le=4096, description="Rollout engines; prompts are shared out among them.")
    ranks: int = Field(1, ge=1, le=4096, description="Processes that train one policy together.")
    start_seconds: float = Field(180.0, gt=0, le=86_400, description="Time to give the processes their places.")
    answer_seconds: float = Field(3600.0, gt=0, le=86_400, description="Longest wait for an answer of a process.")
    replacements: int = Field(3, ge=0, le=1000, description="How often lost processes are replaced before a run fails.")

    @property
    def is_used(self) -> bool:
        """Engines and ranks are processes of their own."""
        several = self.engines > 1 or self.ranks > 1 or self.placement == "separate"
        return self.address is not None or several

    def bundles(self, tensor_parallel: int) -> list[int]:
        """GPUs, or places on a CPU, of each part of a host: separate ranks first, then engines."""
        if self.placement == "colocated":
            return [1] * max(self.engines, self.ranks)
        return [1] * self.ranks + [tensor_parallel] * self.engines

    def too_small(self, tensor_parallel: int, unit: str, available: str) -> str:
        """The refusal of a place with fewer GPUs, or processors, than the sum of `bundles`."""
        per_engine = f", {tensor_parallel} {unit}s an engine" if tensor_parallel > 1 else ""
        settings = f"cluster.engines={self.engines}, ranks={self.ranks}, placement={self.placement}{per_engine}"
        return f"{settings}: {sum(self.bundles(tensor_parallel))} {unit}s are needed, {available}"
