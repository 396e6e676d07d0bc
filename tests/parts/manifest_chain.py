"""The chain of a run's manifests, read without the code that verifies it."""

from collections.abc import Sequence

from fp8core.store.manifest import StepManifest, record_digest


def first_broken_link(manifests: Sequence[StepManifest]) -> int | None:
    """The first step, of a run's manifests in order, that does not name the one before it; None: all do."""
    expected = None
    for manifest in manifests:
        if manifest.record.predecessor != expected:
            return manifest.record.step
        expected = record_digest(manifest)
    return None
