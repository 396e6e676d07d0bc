"""Heads of a run's chain of records: those that a reader noted, and those that were signed.

The last record of a chain vouches for all before it. A head outside of the chain vouches for the last one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8core.errors import UserError
from fp8core.store.manifest import Head, StepManifest, read_signature, signature_file
from fp8core.store.run_view import Finding, spans

LEAST_DIGITS = 16
"""Of a head that is given by its first digits: 64 bits, which nobody hits by trying."""

_HEAD = re.compile(rf"(?:([0-9]{{1,8}}):)?([0-9a-fA-F]{{{LEAST_DIGITS},64}})")


@dataclass
class Chain:
    digests: dict[int, str] = field(default_factory=dict)

    def add(self, manifest: StepManifest) -> None:
        step, digest = Head.of(manifest)
        self.digests[step] = digest

    @property
    def last(self) -> int | None:
        return max(self.digests, default=None)


@dataclass(frozen=True)
class ExpectedHead:
    """A head that the reader noted: 16 to 64 hex digits of a digest, and perhaps the step."""

    step: int | None
    digits: str

    @classmethod
    def parse(cls, text: str) -> "ExpectedHead":
        """From `DIGITS` or `STEP:DIGITS`. Raises UserError."""
        if (parts := _HEAD.fullmatch(text.strip())) is None:
            raise UserError(f"--head {text[:80]}: expected {LEAST_DIGITS} to 64 hex digits of a record's digest")
        return cls(None if parts[1] is None else int(parts[1]), parts[2].lower())

    def compare(self, chain: Chain) -> str | Finding:
        """The line with its position in the chain; an error when the chain has it not once."""
        found = [
            step
            for step, digest in chain.digests.items()
            if digest.startswith(self.digits) and self.step in (None, step)
        ]
        if len(found) != 1:
            how = "no record" if not found else f"the records of steps {spans(found)}"
            given = self.digits if self.step is None else f"{self.step}:{self.digits}"
            return Finding("error", "--head", f"{given} is {how} of this chain")
        return f"is the record of step {found[0]}{coverage(found[0], chain)}"


def coverage(step: int, chain: Chain) -> str:
    last = chain.last
    assert last is not None, "the head is in the chain"
    if step == last:
        return ", the last one"
    later = f"step{'s' if last > step + 1 else ''} {spans(range(step + 1, last + 1))}"
    return f" of {last}: everything up to it is as it was, of {later} it says nothing"


def signature_lines(folder: Path, chain: Chain, trusted: Mapping[str, Path]) -> Iterator[str | Finding]:
    """Verify the signatures beside the manifests: findings, then the summary.

    `trusted`: the public keys that may have signed, fingerprint -> file; empty: any may have.
    """
    signed: dict[str, list[int]] = defaultdict(list)
    wrong = False
    for step, digest in sorted(chain.digests.items()):
        place = str(signature_file(folder, step).relative_to(folder))
        try:
            signature = read_signature(folder, step)
        except UserError as error:
            problem: str | None = str(error)
        else:
            if signature is None:
                continue
            problem = signature.mistake(Head(step, digest))
            if problem is None and trusted and signature.fingerprint not in trusted:
                problem = f"signed by another key, {signature.fingerprint}"
            if problem is None:
                signed[signature.fingerprint].append(step)
        if problem is not None:
            wrong = True
            yield Finding("error", place, problem, step=step)
    good = sorted(step for steps in signed.values() for step in steps)
    if trusted or good or wrong:
        yield from _unsigned(sorted(chain.digests), good, required=bool(trusted))
    yield _summary(signed, trusted) if good else "none" if not wrong else "none that holds"


def _unsigned(steps: Sequence[int], good: Sequence[int], required: bool) -> Iterator[Finding]:
    """The steps without a signature that holds: a later one vouches for them by the chain, or nothing does."""
    last = max(good, default=-1)
    covered = [step for step in steps if step < last and step not in good]
    bare = [step for step in steps if step > last]
    if covered:
        text = f"steps {spans(covered)} have none that holds; that of step {last} vouches for them by the chain"
        yield Finding("note", "signatures", text)
    if bare:
        text = f"steps {spans(bare)} have none that holds, and no later step has one"
        yield Finding("error" if required else "note", "signatures", text)


def _summary(signed: Mapping[str, Sequence[int]], trusted: Mapping[str, Path]) -> str:
    keys = "; ".join(f"steps {spans(steps)} by key {key}" for key, steps in signed.items())
    if trusted:
        return keys
    return f"{keys}; not trusted: whoever wrote the folder may have made the key (--public-key says whose it is)"
