"""The tracking services that a configuration names."""

from importlib.util import find_spec

from flows.tracking.tracker import TrackerEntry
from fp8core.config.shipped import TRACKERS
from fp8core.errors import UserError
from fp8core.user_code import import_attribute


def find_tracker(service: str) -> TrackerEntry:
    """Raises UserError: there is no such entry, or the package is missing that a shipped one is named after."""
    place = f"tracking.services={service}"
    if service in TRACKERS and find_spec(service) is None:
        raise UserError(f"{place}: {service} is not installed (pip install 'fp8-grpo[{service}]')")
    entry = import_attribute(TRACKERS.get(service, service), place)
    if not isinstance(entry, TrackerEntry):
        raise UserError(f"{place}: it is no TrackerEntry (flows/tracking/tracker.py)")
    return entry
