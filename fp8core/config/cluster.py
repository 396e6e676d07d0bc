"""Where a run's engines and trainer ranks lie; they compute the same numbers wherever the contract says exact."""

from typing import Literal

from pydantic import Field

from fp8core.config.section import Section

LOCAL_ADDRESS = r"auto|[^\s:/@]+:\d{1,5}"


class ClusterConfig(Section):
    """Processes of engines and trainer ranks. One of each, colocated, without an address, lie in the run's process."""

    address: str | None = Field(
        None,
        pattern=rf"^({LOCAL_ADDRESS})$",
        description="Ray cluster: HOST:PORT of its head, or auto for the one that this machine belongs to. null starts "
        "one on this machine, for more than one engine or rank, or separate ones, and ends it with the command.",
    )
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: engine i and rank i share a GPU in turn. separate: each has a GPU of its own.",
    )
    engines: int = Field(1, ge=1, le=4096, description="Rollout engines; prompts are shared out among them.")
    ranks: int = Field(1, ge=1, le=4096, description="Processes that train one policy together.")
    start_seconds: float = Field(
        180.0, gt=0, le=86_400, description="Time for the cluster to give the processes their places."
    )
    replacements: int = Field(
        3, ge=0, le=1000, description="How often a process that ended is replaced, with all others, before a run fails."
    )

    @property
    def used(self) -> bool:
        """Whether engines and ranks are processes of their own."""
        several = self.engines > 1 or self.ranks > 1 or self.placement == "separate"
        return self.address is not None or several

    @property
    def bundles(self) -> int:
        """GPUs, or places on a CPU, that the processes take."""
        return max(self.engines, self.ranks) if self.placement == "colocated" else self.engines + self.ranks
