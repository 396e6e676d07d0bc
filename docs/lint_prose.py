"""Check the prose of pages, docstrings and comments against the rules of plain technical English.

    python docs/lint_prose.py README.md docs               # every rule
    python docs/lint_prose.py --rules words fp8core flows   # some rules

Vale has such rules, but its package downloads the program from GitHub when it first runs. This script downloads none.

| rule | a finding is |
| --- | --- |
| length | a sentence of more than 25 words |
| clause | a sentence with a clause as its subject: it starts with who, what, whether, which, how or why |
| verbs | a human verb where a process is the subject: VERBS below |
| words | a word or phrase that has a better one: words.yaml |

Not prose: code, headings, addresses, text between `<!-- begin: NAME -->` and its end, and tables below docs/results,
which scripts print from stored rows. An inline code span counts as one word.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

LONGEST = 25

WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
CLAUSE = re.compile(r"^(?:who|what|whoever|whatever|whether|which|how|why)\b", re.IGNORECASE)
VERBS = re.compile(r"\b(?:asks|knows|says|tells|wants|believes|forgets|remembers)\b", re.IGNORECASE)


class Finding(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Block(NamedTuple):
    """Text that is read in one go: a paragraph, an item of a list, a cell of a table, a docstring's paragraph."""

    line: int
    text: str
    is_cell: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders with .md or .py files")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    options = parser.parse_args()
    findings = [found for path in _files(options.paths) for found in check(path, options.rules)]
    print(*findings, sep="\n", end="\n" if findings else "")
    print(f"{len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


def check(path: Path, rules: list[str]) -> Iterator[Finding]:
    """The findings of one file, in the order of its lines."""
    text = path.read_text()
    blocks = markdown_blocks(text) if path.suffix == ".md" else python_blocks(text)
    for line, block, is_cell in blocks:
        if is_cell and "results" in path.parts:
            continue
        for sentence in sentences(block):
            for rule in rules:
                if (said := RULES[rule](sentence)) is not None:
                    yield Finding(path, line, rule, said)


def sentences(block: str) -> list[str]:
    """The sentences of a block, with code, links and emphasis as plain words."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    plain = re.sub(r"`+[^`]+`+", "code", plain)
    plain = re.sub(r"[*_]{2}|https?://\S+", " ", plain.replace("<br>", ". "))
    plain = re.sub(r"\b(?:e\.g|i\.e|vs|et al|etc)\.", "", plain)
    return [part.strip() for part in re.split(r"(?<=[.!?])[)\"']*\s+", plain) if part.strip()]


def _length(sentence: str) -> str | None:
    words = re.findall(r"[^\s|]*\w[^\s|]*", sentence)
    return f"{len(words)} words: {sentence[:90]}" if len(words) > LONGEST else None


def _clause(sentence: str) -> str | None:
    return sentence[:90] if CLAUSE.match(sentence) and sentence.endswith(".") else None


def _verbs(sentence: str) -> str | None:
    found = VERBS.search(sentence)
    return f"{found[0]}: {sentence[:90]}" if found else None


def _words(sentence: str) -> str | None:
    for pattern, better in WORDS.items():
        if found := re.search(pattern, sentence, re.IGNORECASE):
            return f"{found[0]!r}, better: {better}"
    return None


RULES: dict[str, Callable[[str], str | None]] = {"length": _length, "clause": _clause, "verbs": _verbs, "words": _words}


def markdown_blocks(text: str) -> Iterator[Block]:
    """Paragraphs, items and cells; no headings, fences, comments or front matter."""
    # A script writes what lies between markers; it is checked where it comes from.
    text = re.sub(r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->", _empty_lines, text, flags=re.DOTALL)
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", _empty_lines, text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1`*$", _empty_lines, text, flags=re.DOTALL | re.MULTILINE)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        starts_item = re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        if lines and (not line.strip() or starts_item or line.startswith(("|", "#"))):
            yield Block(start, " ".join(lines))
            lines = []
        if line.startswith("|"):
            if not re.fullmatch(r"[|\s:-]+", line):
                yield from (Block(number, cell.strip(), True) for cell in re.split(r"(?<!\\)\|", line) if cell.strip())
        elif line.strip() and not line.startswith(("#", "    ")):
            if not lines:
                start = number
            lines.append(re.sub(r"^\s*(?:[-*]|\d+\.|>)\s+", "", line).strip())


def python_blocks(text: str) -> Iterator[Block]:
    """Docstrings' paragraphs and comments that stand alone."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for block in markdown_blocks(ast.get_docstring(node) or ""):
                yield Block(node.body[0].lineno + block.line - 1, block.text)
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            if not lines:
                start = token.start[0]
            lines.append(token.string.lstrip("# "))
        elif lines and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield Block(start, " ".join(lines))
            lines = []


def _empty_lines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".md", ".py"))
        else:
            yield path


if __name__ == "__main__":
    sys.exit(main())
