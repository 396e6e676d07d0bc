"""Memory that is needed, phase by phase: what a plan consists of."""

from dataclasses import dataclass

from fp8core.plan.devices import Device

GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """A line of a plan; `note` says what is in it, or that it is an estimate."""

    item: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Phase:
    """What lies on a device at the same time.

    Attributes:
        name: generating, training, syncing.
        needs: all that is there.
        limit: bytes that it may take; None where nobody knows.
        advice: what to change where it takes more.
    """

    name: str
    needs: tuple[Need, ...]
    limit: int | None
    advice: str

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(need.bytes for need in self.needs)

    @property
    def fits(self) -> bool:
        """Whether the limit holds it; true where there is none."""
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True)
class DevicePlan:
    """The phases of one device, or of each of `count` equal ones."""

    device: Device | None
    count: int
    phases: tuple[Phase, ...]

    @property
    def name(self) -> str:
        """For people."""
        if self.device is None:
            return "host"
        return self.device.name if self.count == 1 else f"each of {self.count} {self.device.name}"

    def refusals(self) -> list[str]:
        """A line for each phase that does not fit."""
        return [
            f"{phase.name} on {self.name} needs {gib(phase.total)} GiB ({_largest(phase)}), "
            f"there are {gib(phase.limit)}; {phase.advice}"
            for phase in self.phases
            if phase.limit is not None and not phase.fits
        ]


def gib(size: int) -> str:
    """Bytes as GiB for people: one decimal, more for what would be zero."""
    return f"{size / GIB:,.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.2g}"


def _largest(phase: Phase) -> str:
    largest = sorted(phase.needs, key=lambda need: -need.bytes)[:3]
    return ", ".join(f"{need.item} {gib(need.bytes)}" for need in largest)
