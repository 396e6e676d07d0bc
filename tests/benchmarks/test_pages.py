"""Pages have the tables that these scripts print of stored rows, every one and as it is."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import greedy_agreement, hopper_tables, host_costs, megatron_tables, small_tables, training_tables
from benchmarks.stored import RESULTS, stored

DOCS = Path(__file__).parents[2] / "docs"


def _printed_of(name: str) -> Callable[[], None]:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return lambda: print(*small_tables.tables(rows), sep="\n\n")


PRINTERS = {
    "kernels and engine": ("performance.md", hopper_tables.main),
    "greedy tokens": ("performance.md", lambda: print(greedy_agreement.table(stored("greedy_agreement")))),
    "training": ("performance.md", training_tables.main),
    "the loop": ("performance.md", _printed_of("small_hopper")),
    "a step of 8B": ("performance.md", _printed_of("large_ledger")),
    "the process beside a GPU": (
        "performance.md",
        lambda: print(*host_costs.tables(stored("host_costs")), sep="\n\n"),
    ),
    "Megatron": ("megatron.md", megatron_tables.main),
}


@pytest.mark.parametrize(("page", "printer"), PRINTERS.values(), ids=PRINTERS)
def test_a_page_has_every_table_of_what_is_stored(page, printer, capsys) -> None:
    printer()
    tables = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.MULTILINE)
    text = (DOCS / page).read_text()
    assert tables
    assert not [table.splitlines()[0] for table in tables if table + "\n" not in text]
