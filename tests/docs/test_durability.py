"""Every promise of docs/reference/failures.md names the test that holds it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./\.\./(tests/[^)]+\.py)\)")


def test_each_row_of_failures_names_tests_that_exist() -> None:
    page = (DOCS / "reference" / "failures.md").read_text()
    table = page.split("| failure |")[1].split("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        links = LINK.findall(row)
        assert links, row
        for words, file in links:
            source = (DOCS.parent / file).read_text()
            assert f"def test_{words.replace(' ', '_')}(" in source, f"{file}: {words}"
