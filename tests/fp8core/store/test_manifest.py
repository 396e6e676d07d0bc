"""Keys as openssl makes them, signatures as openssl checks them, and each file that is none."""

import hashlib
import math
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from manifest_chain import first_broken_link
from pydantic import JsonValue, TypeAdapter, ValidationError

from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.store.json_text import canonical_json
from fp8core.store.manifest import (
    Content,
    Head,
    Signature,
    SigningKey,
    StepManifest,
    StepObservations,
    StepRecord,
    code_version,
    fingerprint,
    git_state,
    hardware,
    library_versions,
    message,
    read_public_key,
    read_signature,
    read_signing_key,
    record_digest,
    signature_file,
    write_signature,
)


def manifest(step: int = 0, predecessor: str | None = None, seconds: float = 1.0) -> StepManifest:
    return StepManifest(
        record=StepRecord(
            step=step,
            predecessor=predecessor,
            config_digest="c",
            code_version="v",
            steps=3,
            inputs={"train": {"rollouts": Content(digest="aa", size=2)}},
            outputs={"train": {"policy": Content(digest="bb", size=3)}},
            model_revision=None,
            seeds={"rollout": 7},
            scales_digest=None,
            precision=PrecisionContract().model_dump(mode="json"),
            executed={"rollout": {"engine": "embedded"}},
            level="exact",
            weights_digest="w",
            versions={"torch": "2"},
        ),
        observed=StepObservations(timings={"train": seconds}, hardware={"cores": 2}, paths={"policy": "artifacts/x"}),
    )


def chain(length: int) -> list[StepManifest]:
    manifests = [manifest(0)]
    for step in range(length - 1):
        manifests.append(manifest(step, record_digest(manifests[-1])))
    return manifests


def replace_in_record(original: StepManifest, **changes: object) -> StepManifest:
    return original.model_copy(update={"record": original.record.model_copy(update=changes)})


def test_the_digest_is_of_the_canonical_record() -> None:
    record = manifest().record.model_dump(mode="json")
    assert record_digest(manifest()) == hashlib.sha256(canonical_json(record, "record")).hexdigest()


def test_the_digest_survives_storage_and_ignores_what_was_observed() -> None:
    first = manifest(seconds=1.0)
    assert record_digest(StepManifest.model_validate_json(first.model_dump_json())) == record_digest(first)
    assert record_digest(manifest(seconds=2.0)) == record_digest(first)


def test_the_chain_holds_and_a_changed_or_missing_step_breaks_it() -> None:
    manifests = chain(5)
    assert first_broken_link(manifests) is None
    assert first_broken_link([]) is None
    changed = [*manifests[:2], replace_in_record(manifests[2], weights_digest="forged"), *manifests[3:]]
    assert first_broken_link(changed) == 2
    assert first_broken_link(manifests[:2] + manifests[3:]) == 2
    assert first_broken_link(manifests[1:]) == 0


def test_another_schema_version_and_numbers_without_json_are_refused() -> None:
    stored = manifest().model_dump(mode="json")
    with pytest.raises(ValidationError, match="schema_version"):
        StepManifest.model_validate({**stored, "schema_version": 1})
    with pytest.raises(UserError, match=r"record\.precision\.margin is inf"):
        record_digest(replace_in_record(manifest(), precision={"margin": math.inf}))
    with pytest.raises(ValidationError, match="finite"):
        manifest(seconds=math.nan)


HEAD = Head(12, "ab" * 32)


def openssl(*arguments: object) -> bytes:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True).stdout


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "key.pem")
    openssl("pkey", "-in", tmp_path / "key.pem", "-pubout", "-out", tmp_path / "key.pub.pem")
    return tmp_path / "key.pem"


@pytest.fixture
def key(pem: Path) -> SigningKey:
    return read_signing_key("artifacts.signing_key", pem)


def test_openssl_checks_a_signature_by_its_key_and_names_it_the_same(pem: Path, key: SigningKey) -> None:
    folder = pem.parent
    (folder / "line").write_bytes(message(HEAD))
    (folder / "signature").write_bytes(bytes.fromhex(key.sign(HEAD).signature))
    public = folder / "key.pub.pem"
    files = ["-in", folder / "line", "-sigfile", folder / "signature"]
    assert b"Verified" in openssl("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", *files)
    openssl("pkey", "-pubin", "-in", public, "-outform", "DER", "-out", folder / "key.der")
    shown = openssl("dgst", "-sha256", "-r", folder / "key.der").split()[0].decode()
    assert shown == key.fingerprint == fingerprint(read_public_key("--public-key", public))


def test_a_stored_signature_holds_for_its_record_and_no_other(tmp_path: Path, key: SigningKey) -> None:
    write_signature(tmp_path, key.sign(HEAD))
    stored = read_signature(tmp_path, 12)
    assert stored == key.sign(HEAD), "the same each time"
    assert stored.mistake(HEAD) is None
    assert "it signs the record 12:abab" in str(stored.mistake(Head(12, "cd" * 32)))
    assert "it signs the record 12:abab" in str(stored.mistake(Head(13, HEAD.digest)))
    moved = stored.model_copy(update={"step": 13})
    assert "does not fit" in str(moved.mistake(Head(13, HEAD.digest)))
    borrowed = stored.model_copy(update={"fingerprint": "0" * 64})
    assert "fingerprint" in str(borrowed.mistake(HEAD))
    assert read_signature(tmp_path, 13) is None


def test_nothing_of_the_private_key_is_written_or_shown(tmp_path: Path, pem: Path, key: SigningKey) -> None:
    write_signature(tmp_path, key.sign(HEAD))
    secret = pem.read_text().splitlines()[1]
    raw = openssl("pkey", "-in", pem, "-outform", "DER")[-32:].hex()
    for text in (signature_file(tmp_path, 12).read_text(), repr(key), str(vars(key))):
        assert secret not in text
        assert raw not in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a private key in PEM; openssl genpkey"),
        (b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n", "not a private key in PEM; openssl"),
        (b"\x00" * 200_000, "not a private key in PEM; openssl genpkey"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_key_is_one_line_without_its_content(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_signing_key("artifacts.signing_key", path)
    assert str(caught.value).startswith(f"artifacts.signing_key {path}: {reason}")
    assert "c2VjcmV0" not in str(caught.value)
    with pytest.raises(UserError, match=r"^--public-key .*: (cannot be read|not a public key)"):
        read_public_key("--public-key", path)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_signing_key("artifacts.signing_key", tmp_path)


def test_other_kinds_of_keys_are_refused_by_name(tmp_path: Path, pem: Path) -> None:
    public, other, locked = pem.with_name("key.pub.pem"), tmp_path / "rsa.pem", tmp_path / "locked.pem"
    with pytest.raises(UserError, match=r"\(it is a public one\)"):
        read_signing_key("artifacts.signing_key", public)
    with pytest.raises(UserError, match="not a public key in PEM"):
        read_public_key("--public-key", pem)
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", other)
    with pytest.raises(UserError, match="not an ed25519 key"):
        read_signing_key("artifacts.signing_key", other)
    openssl("pkey", "-in", other, "-pubout", "-out", public)
    with pytest.raises(UserError, match="not an ed25519 key"):
        read_public_key("--public-key", public)
    openssl("pkey", "-in", pem, "-aes256", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(UserError, match="has a password"):
        read_signing_key("artifacts.signing_key", locked)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 200_000, b'{"step": "x"}', b"\xff\xfe", b'{"step": 1e999}', b"null"]
)
def test_a_malformed_signature_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = signature_file(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^not a signature: [^\n]+$"):
        read_signature(tmp_path, 3)
    assert Signature.model_fields.keys() == {"step", "record", "public_key", "fingerprint", "signature"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "core"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "part" / "a.py").write_text("one = 1\n")
    return folder


def test_code_version_covers_names_and_contents_of_sources_alone(package: Path, tmp_path: Path) -> None:
    version = code_version(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").touch()
    (package / "notes.txt").touch()
    assert code_version(package) == version
    copy = shutil.copytree(package, tmp_path / "installed" / "core")
    assert code_version(copy) == version
    (package / "part" / "a.py").write_text("one = 2\n")
    changed = code_version(package)
    (package / "part" / "a.py").rename(package / "part" / "b.py")
    assert len({version, changed, code_version(package)}) == 3


def test_code_version_of_several_packages_does_not_depend_on_their_order(package: Path) -> None:
    other = shutil.copytree(package, package.parent / "tasks")
    assert code_version(package, other) == code_version(other, package)
    assert len({code_version(package, other), code_version(package), code_version(other)}) == 3


def test_library_versions_name_what_is_installed() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert {"numpy", "pyarrow"} <= set(versions)


def test_a_library_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.store.manifest._LIBRARIES", ("torch", "no-such-library"))
    assert set(library_versions()) == {"python", "torch"}


def test_hardware_is_json_and_plausible() -> None:
    found = hardware()
    TypeAdapter(dict[str, JsonValue]).validate_python(found)
    assert found["machine"] == platform.machine()
    assert isinstance(found["memory"], int)
    assert 2**28 < found["memory"] < 2**50


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state_of_a_checkout(package: Path) -> None:
    checkout = package.parent
    assert git_state(package) == {}
    git(checkout, "init")
    assert git_state(package) == {}
    git(checkout, "add", ".")
    assert git_state(package) == {}, "no commit yet"
    git(checkout, "commit", "-m", "first")
    assert git_state(package) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("changed = True\n")
    assert git_state(package)["dirty"] is True


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_folder_that_the_checkout_around_it_does_not_track_has_no_state(package: Path) -> None:
    checkout = package.parent
    (checkout / ".gitignore").write_text("core/\n")
    git(checkout, "init")
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "first")
    assert git_state(package) == {}
    assert git_state(checkout) != {}


def test_without_git_there_is_no_state(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(package) == {}


@pytest.mark.parametrize("name", ["a.py", "b.cu", "c.cuh"])
def test_every_source_that_computes_is_in_the_code_version(tmp_path: Path, name: str) -> None:
    for each in ("a.py", "b.cu", "c.cuh", "notes.txt"):
        (tmp_path / each).write_text("1")
    before = code_version(tmp_path)
    (tmp_path / "notes.txt").write_text("2")
    assert code_version(tmp_path) == before
    (tmp_path / name).write_text("2")
    assert code_version(tmp_path) != before
