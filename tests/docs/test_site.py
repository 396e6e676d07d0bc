"""The docs build into a site without a warning: all links and anchors lead somewhere, all pages are in its menu."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TAG = re.compile(r"<[^>]+>")
PROSE = re.compile(r"<(?:p|li|td)>(.*?)</(?:p|li|td)>", re.DOTALL)


def build(repository: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        repository / "mkdocs.yml",
        "--site-dir",
        target,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_no_program(site):
    pages = {page.relative_to(REPOSITORY / "docs").with_suffix(".html") for page in (REPOSITORY / "docs").rglob("*.md")}
    made = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page for page in made if page.parts[0] not in ("source", "404.html")} == pages
    assert not list(site.rglob("*.py"))


def test_links_to_files_of_the_repository_lead_to_their_text(site):
    page = (site / "extending.html").read_text()
    assert 'href="source/tasks/filter.py.html"' in page
    shown = TAG.sub("", (site / "source" / "tasks" / "filter.py.html").read_text())
    assert "def keep_informative(" in shown


def test_markdown_reads_as_on_github(site):
    """A list or a table that follows a line of text without a blank line is a list on GitHub only."""
    for page in site.rglob("*.html"):
        if page.is_relative_to(site / "source"):
            continue
        for prose in PROSE.findall(page.read_text()):
            assert not re.search(r"^\s*(?:[-*] |\d+\. |\|.*\|$)|```|\]\(", prose, re.MULTILINE), f"{page.name}: {prose}"


def test_broken_links_fail_the_build(tmp_path):
    wrong = {
        "[a](nowhere.md)": "nowhere.md",
        "[a](../../tasks/nothing.py)": "../../tasks/nothing.py",
        "[a](demo.md#nothing)": "#nothing",
    }
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "start" / "demo.md").open("a") as page:
        page.write("".join(f"\n{link}\n" for link in wrong))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for said in wrong.values():
        assert any("start/demo.md" in line and said in line for line in done.stderr.splitlines()), done.stderr


def test_long_tables_and_files_are_folded_and_no_page_is_endless(site):
    """A page beside the reference has few rows and lines that are shown at once."""
    for page in {*(site / "results").glob("*.html")} - {site / "results" / "index.html"}:
        text = re.sub(r"<details>.*?</details>", "", page.read_text(), flags=re.DOTALL)
        tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
        assert all(table.count("<tr>") <= 9 and len(re.findall("<th[ >]", table)) <= 10 for table in tables), page.name
    folded = (site / "results" / "rollout.html").read_text()
    assert "<summary>" in folded
    examples = re.findall(r"<summary><code>(\w+\.py)</code>", (site / "extending.html").read_text())
    assert "brevity.py" in examples
    assert "silence.py" not in examples, "a short one"
    assert "<summary>" not in (site / "reference" / "config.html").read_text()
