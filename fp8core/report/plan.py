"""A plan of memory as text."""

from collections.abc import Iterator

from fp8core.plan.needs import DevicePlan, Phase
from fp8core.plan.rollout import CacheRoom
from fp8core.plan.run_plan import RunPlan
from fp8core.plan.weights import ParameterCounts, StoredBytes

_ITEM, _SIZE = 38, 9
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def plan_text(plan: RunPlan) -> str:
    """A table for each phase of each device, then what the cache holds and what a sync sends."""
    lines = [f"model  {_parameters(plan.parameters)}", ""]
    for device in plan.devices:
        for phase in device.phases:
            lines += [*_phase(device, phase), ""]
    if plan.cache is not None:
        lines.append(f"cache  {_cache(plan.cache)}")
    return "\n".join([*lines, f"sync   {_sync(plan.sync)}"])


def _parameters(counts: ParameterCounts) -> str:
    active = f", {_number(counts.active)} for a token" if counts.active < counts.total else ""
    parts = f"{_number(counts.linear)} in linears, {_number(counts.head)} in the head"
    return f"{_number(counts.total)} parameters{active}: {parts}"


def _phase(device: DevicePlan, phase: Phase) -> Iterator[str]:
    unit = next((unit for unit, size in _UNITS.items() if phase.total >= size), "KiB")
    yield f"{f'{phase.name} on {device.name}':<{_ITEM + 2}}{unit:>{_SIZE}}"
    for need in phase.needs:
        yield f"  {need.item:<{_ITEM}}{_size(need.bytes, unit)}  {need.note}".rstrip()
    yield f"  {'total':<{_ITEM}}{_size(phase.total, unit)}  {_verdict(phase, unit)}".rstrip()


def _verdict(phase: Phase, unit: str) -> str:
    if phase.limit is None:
        return ""
    return f"{'of' if phase.fits else 'does not fit:'} {_size(phase.limit, unit).strip()}"


def _size(size: int, unit: str) -> str:
    return f"{size / _UNITS[unit]:>{_SIZE},.1f}"


def _number(count: int) -> str:
    return f"{count / 1e9:.3f} G" if count >= 10**8 else f"{count:,}"


def _cache(room: CacheRoom) -> str:
    engines = "" if room.engines == 1 else f" in each of {room.engines} engines"
    return f"{room.tokens:,} tokens{engines}: {room.sequences:,} sequences of {room.sequence:,}, {room.wanted:,} wanted"


def _sync(sync: StoredBytes) -> str:
    return f"{sync.total:,} bytes: {sync.codes:,} FP8 codes, {sync.scales:,} scales, {sync.kept:,} in other formats"
