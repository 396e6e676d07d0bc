"""A Hugging Face dataset by name, subset and split, from a mirror of the hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from prefect.settings import PREFECT_API_URL

from fp8core.store.artifacts import ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

NAME = "someone/sums"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: hard
  data_files: [{split: train, path: hard/train.jsonl}]
- config_name: easy
  data_files: [{split: train, path: easy/train.jsonl}, {split: more, path: easy/more.jsonl}]
---
"""


def rows(first: int) -> str:
    return "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(first, first + 99))


FILES = {
    "README.md": CARD,
    **{f"{part}.jsonl": rows(first) for part, first in (("hard/train", 100), ("easy/train", 200), ("easy/more", 300))},
}


class Hub(BaseHTTPRequestHandler):
    """Answers what `datasets` asks about one repository: its commit, its tree, and its files."""

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].removeprefix("/api").split("/")
        place = "/".join(parts[6:])
        content = None
        if parts[1:4] == ["datasets", *NAME.split("/")]:
            match parts[4:5]:
                case ["resolve"]:
                    content = FILES.get(place)
                case ["tree"]:
                    content = json.dumps([entry(path) for path in FILES if path.startswith(place)])
                case ["paths-info"]:
                    asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
                    content = json.dumps([entry(path) for path in asked if path in FILES])
                case _:
                    files = [{"rfilename": path} for path in FILES]
                    content = json.dumps({"id": NAME, "sha": COMMIT, "siblings": files, "tags": [], "private": False})
        body = (content or "").encode()
        self.send_response(404 if content is None else 200)
        for name, value in {"Content-Length": len(body), "ETag": digest(body), "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def digest(content: bytes) -> str:
    return sha1(content).hexdigest()


def entry(path: str) -> dict[str, object]:
    content = FILES[path].encode()
    return {"type": "file", "path": path, "size": len(content), "oid": digest(content)}


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_training_takes_the_rows_of_its_subset_and_split(
    hub: str, prefect_server: None, mlflow_store: Callable[[Path], Path], tmp_path: Path
) -> None:
    mlflow_store(tmp_path / "runs")
    data = (f"data.source={NAME}", "data.subset=easy", "data.split=more", "reward.verifier=mine.py:score")
    small = ("rollout.prompts_per_step=4", "rollout.group_size=2", "evaluation.prompts=4", "steps=1", "warm_start=null")
    (tmp_path / "mine.py").write_text("def score(completion, answer):\n    return completion == answer\n")
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    command = [sys.executable, "-m", "flows.cli", "run", "tiny"]
    command += [word for setting in (*data, *small, "run=one") for word in ("--set", setting)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "one"
    artifacts = LedgerView.read(folder / LEDGER).artifacts(1)
    asked = ArtifactStore(folder).get_table(artifacts["prompts"])["text"].to_pylist()
    assert len(asked) == 4
    assert all(text[0] == "3" and text.endswith("+1=") for text in asked), asked
