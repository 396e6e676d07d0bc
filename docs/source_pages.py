"""A hook of MkDocs: files of the repository that pages link to become pages of the site, and what is long is folded.

`[filter](../tasks/filter.py)` works on GitHub as it stands. The site has no such file, so it gets a page
`source/tasks/filter.py.html` with the file's text, or the names in a folder. The link leads there. A link to
what is not in the repository is left as it is, and MkDocs complains.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?P<path>[\w./-]+)\)")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".md": "markdown"}
# Out of the search, and as wide as can be.
FRONT_MATTER = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n\n"
FENCE = "``````"
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROWS_SHOWN, COLUMNS_SHOWN = 8, 10
# A file of an example: its first line is a comment with its name.
CODE = re.compile(r'<div class="(?:language-\w+ )?highlight">.*?</div>', re.DOTALL)
NAMED = re.compile(r"^# (?P<name>[\w.]+)\n")
LINES_SHOWN = 20


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file and folder that a page links to and the site does not have."""
    for page in list(files.documentation_pages()):
        for path in _outside(page, files):
            name = _source_page(page, path)
            if name not in files.src_uris:
                files.append(File.generated(config, name, content=_content(_target(page, path))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the pages that `on_files` added."""
    if page.file.generated_by is not None:
        return markdown
    for path in set(_outside(page.file, files)):
        start = posixpath.dirname(page.file.src_uri)
        markdown = markdown.replace(
            f"]({path})", f"]({posixpath.relpath(_source_page(page.file, path), start or '.')})"
        )
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fold long and wide tables of results, and long files of examples: the sentences of a page stand together."""
    if page.file.generated_by is not None or page.is_index:
        return html
    if page.file.src_uri.startswith("results/"):
        html = TABLE.sub(lambda found: _folded_table(found[0]), html)
    return CODE.sub(lambda found: _folded_file(found[0]), html)


def _folded_table(table: str) -> str:
    rows, columns = table.count("<tr>") - 1, len(re.findall("<th[ >]", table))
    folds = rows > ROWS_SHOWN or columns > COLUMNS_SHOWN
    return f"<details><summary>{rows} rows</summary>{table}</details>" if folds else table


def _folded_file(code: str) -> str:
    text = re.sub(r"<[^>]+>", "", code).lstrip("\n")
    named, lines = NAMED.match(text), text.count("\n")
    if named is None or lines <= LINES_SHOWN:
        return code
    return f"<details><summary><code>{named['name']}</code>, {lines} lines</summary>{code}</details>"


def _outside(page: File, files: Files) -> Iterator[str]:
    """Links of a page to what is in the repository and not a file of the site."""
    for path in LINK.findall(page.content_string):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), path))
        if name not in files.src_uris and _target(page, path).exists():
            yield path


def _target(page: File, path: str) -> Path:
    return (REPOSITORY / "docs" / page.src_uri).parent.joinpath(path).resolve()


def _source_page(page: File, path: str) -> str:
    return f"source/{_target(page, path).relative_to(REPOSITORY).as_posix()}.md"


def _content(target: Path) -> str:
    title = f"{FRONT_MATTER}# {target.relative_to(REPOSITORY).as_posix()}\n\n"
    if target.is_dir():
        return title + "".join(f"- `{item.name}`\n" for item in sorted(target.iterdir()))
    return f"{title}{FENCE}{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text().rstrip()}\n{FENCE}\n"
