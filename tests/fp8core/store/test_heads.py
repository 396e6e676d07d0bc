"""What vouches for the chain of a run: a head that somebody was told, and signatures."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fp8core.errors import UserError
from fp8core.store.heads import Chain, ExpectedHead, signature_lines
from fp8core.store.manifest import Head, SigningKey, signature_file, write_signature
from fp8core.store.run_view import Finding, spans

DIGESTS = [f"{step:x}" * 64 for step in range(4)]
LINKS = Chain(dict(enumerate(DIGESTS)))
KEY, OTHER_KEY = (SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
FILE = Path("key.pub.pem")


def sign(folder: Path, *steps: int, key: SigningKey = KEY) -> None:
    for step in steps:
        write_signature(folder, key.sign(Head(step, DIGESTS[step])))


def signature_summary(folder: Path, trusted: SigningKey | None = None) -> tuple[list[str], str]:
    keys = {} if trusted is None else {trusted.fingerprint: FILE}
    *findings, line = signature_lines(folder, LINKS, keys)
    assert all(isinstance(finding, Finding) for finding in findings)
    return [str(finding) for finding in findings], str(line)


# --- a head that was told ---


@pytest.mark.parametrize("text", [DIGESTS[3], f"3:{DIGESTS[3]}", DIGESTS[3][:16], f" {DIGESTS[3]}\n"])
def test_the_last_record_vouches_for_all(text: str) -> None:
    assert ExpectedHead.parse(text).compare(LINKS) == "is the record of step 3, the last one"


def test_an_earlier_record_vouches_for_what_precedes_it() -> None:
    says = "is the record of step 1 of 3: everything up to it is as it was, of steps 2-3 it says nothing"
    assert ExpectedHead.parse(DIGESTS[1].upper()).compare(LINKS) == says
    assert ExpectedHead.parse(DIGESTS[2]).compare(LINKS).endswith("of step 3 it says nothing")


@pytest.mark.parametrize("text", ["f" * 64, f"2:{DIGESTS[3]}", DIGESTS[3][:15] + "0", "f" * 16])
def test_a_head_that_is_not_in_the_chain_is_an_error(text: str) -> None:
    found = ExpectedHead.parse(text).compare(LINKS)
    assert isinstance(found, Finding)
    assert str(found) == f"error --head: {text} is no record of this chain"


def test_first_digits_that_fit_two_records_are_an_error() -> None:
    links = Chain({0: "a" * 64, 1: "a" * 16 + "b" * 48})
    found = ExpectedHead.parse("a" * 16).compare(links)
    assert str(found) == f"error --head: {'a' * 16} is the records of steps 0-1 of this chain"
    assert ExpectedHead.parse("a" * 17).compare(links) == ExpectedHead.parse("0:" + "a" * 16).compare(links)


@pytest.mark.parametrize("text", ["", "a" * 15, "a" * 65, "g" * 64, ":" + "a" * 64, "-1:" + "a" * 64, "a" * 16 + "\nb"])
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected 16 to 64 hex digits"):
        ExpectedHead.parse(text)


# --- signatures ---


def test_a_run_without_signatures_says_so_and_is_refused_where_a_key_is_asked_for(tmp_path: Path) -> None:
    assert signature_summary(tmp_path) == ([], "none")
    assert signature_summary(tmp_path, KEY)[0] == [
        "error signatures: steps 0-3 have none that holds, and no later step has one"
    ]


def test_signatures_that_hold_are_not_trusted_without_a_key(tmp_path: Path) -> None:
    sign(tmp_path, *range(4))
    findings, line = signature_summary(tmp_path)
    assert findings == []
    assert line.startswith(f"steps 0-3 by key {KEY.fingerprint}; not trusted: ")
    assert signature_summary(tmp_path, KEY) == ([], f"steps 0-3 by key {KEY.fingerprint}")


def test_each_signature_by_another_key_is_an_error(tmp_path: Path) -> None:
    sign(tmp_path, 0, 1, 3)
    sign(tmp_path, 2, key=OTHER_KEY)
    assert [finding.partition(": ")[0] for finding in signature_summary(tmp_path, KEY)[0]] == [
        "error manifests/00002.signature.json (step 2)",
        "note signatures",
    ]
    *findings, _ = signature_lines(tmp_path, LINKS, {KEY.fingerprint: FILE, OTHER_KEY.fingerprint: FILE})
    assert findings == [], "a key that was replaced by another"


def test_steps_after_the_last_signature_are_vouched_for_by_nobody(tmp_path: Path) -> None:
    sign(tmp_path, 1, 2)
    covered = "steps 0 have none that holds; that of step 2 vouches for them by the chain"
    bare = "steps 3 have none that holds, and no later step has one"
    assert signature_summary(tmp_path)[0] == [f"note signatures: {covered}", f"note signatures: {bare}"]
    assert signature_summary(tmp_path, KEY)[0] == [f"note signatures: {covered}", f"error signatures: {bare}"]


@pytest.mark.parametrize("trusted", [None, KEY])
def test_a_signature_that_does_not_hold_is_an_error_with_and_without_a_key(
    tmp_path: Path, trusted: SigningKey | None
) -> None:
    sign(tmp_path, *range(4))
    signature_file(tmp_path, 3).write_bytes(signature_file(tmp_path, 2).read_bytes())
    signature_file(tmp_path, 1).write_text("{")
    errors = [finding for finding in signature_summary(tmp_path, trusted)[0] if finding.startswith("error manifests")]
    assert [error.partition(": ")[2][:20] for error in errors] == ["not a signature: Inv", "it signs the record "]


def test_steps_in_words() -> None:
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans({5, 0, 1, 2, 9, 8}) == "0-2, 5, 8-9"
