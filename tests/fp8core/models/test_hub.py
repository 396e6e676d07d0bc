import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8core.errors import UserError
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.hub import ResolvedModel, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = """
import sys
from pathlib import Path
from fp8core.errors import UserError
from fp8core.models.hub import resolve_model
model, revision, cache = sys.argv[1:]
try:
    found = resolve_model(model, revision or None, Path(cache))
    print(found.folder, found.revision)
except UserError as error:
    print("UserError:", error)
"""


@pytest.fixture(params=["offline mode", "refused connection"])
def resolve(request: pytest.FixtureRequest, tmp_path: Path):
    """Resolve in a process of its own, because huggingface_hub reads its settings when it is imported."""
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    settings = {"HF_HUB_OFFLINE": "1"} if request.param == "offline mode" else unreachable

    def run(model: str, revision: str = "") -> str:
        command = [sys.executable, "-c", RESOLVE, model, revision, str(tmp_path)]
        return subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.rstrip("\n")

    return run


@pytest.fixture
def cached(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, holding one snapshot."""
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in small_checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_folder_is_used_as_it_is(small_checkpoint):
    assert resolve_model(str(small_checkpoint), None) == ResolvedModel(small_checkpoint, None)
    with pytest.raises(UserError, match="revision=main applies to hub ids"):
        resolve_model(str(small_checkpoint), "main")


@pytest.mark.parametrize("model", ["/no/such", "./checkpoint", "../a", "~/no-such-folder", "a/b/c", "checkpoint"])
def test_a_path_that_does_not_exist_is_refused(model):
    with pytest.raises(UserError, match=r"no such folder, and not a hub id") as refused:
        resolve_model(model, None)
    assert model in str(refused.value)


def test_a_file_is_no_checkpoint(small_checkpoint):
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(str(small_checkpoint / "config.json"), None)


def test_a_malformed_id_is_refused():
    with pytest.raises(UserError, match="neither a folder nor a model"):
        resolve_model("some one/a--b..c", None)


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_without_network_the_line_says_what_to_run(resolve, revision):
    started = time.monotonic()
    line = resolve("someone/absent", revision)
    assert time.monotonic() - started < 10
    assert line.startswith("UserError: model=someone/absent: not in the cache, and the hub did not answer (")
    at = f" --revision {revision}" if revision else ""
    assert f"run `hf download someone/absent{at} --local-dir FOLDER`, then pass `--set model=FOLDER`" in line
    assert "\n" not in line


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_without_network_the_cache_is_used(resolve, cached, revision):
    assert resolve("someone/tiny", revision) == f"{cached} {COMMIT}"
    assert load_checkpoint(cached).architecture.family == "qwen3"
