"""Pages of docs/ that code, messages and configurations name are there, and links of pages lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NAMED = re.compile(r"(?<![\w/])docs/[\w/-]+\.(?:md|py|json|png|svg)\b")
# Of other projects, which comments cite.
ELSEWHERE = ("docs/algo/", "docs/guides/grpo.md", "docs/adding-new-models.md", "docs/algorithms.md")
FOLDERS = ("flows", "tasks", "fp8core", "configs", "tests", "benchmarks", "docs")


def test_pages_that_sources_name_exist() -> None:
    files = [REPOSITORY / name for name in ("README.md", "Makefile", "mkdocs.yml", "prefect.yaml", "pyproject.toml")]
    for folder in FOLDERS:
        files += [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".yaml", ".md")]
    missing = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in files
        for name in NAMED.findall(path.read_text())
        if not name.startswith(ELSEWHERE) and not (REPOSITORY / name).is_file()
    }
    assert not missing


def test_links_of_pages_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", REPOSITORY / "mkdocs.yml", "-d", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
