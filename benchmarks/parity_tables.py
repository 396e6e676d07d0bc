"""The table of a parity run for docs/parity.md: what was found of each variant.

    python benchmarks/parity_tables.py runs/parity/NAME/verdict.json --keep benchmarks/results/parity_tiny.json
    python benchmarks/parity_tables.py benchmarks/results/parity_tiny.json

--keep writes what the table needs without the settings, which name folders.
"""

import argparse
import json
from pathlib import Path

KEPT = ("config", "ended", "outcome", "seeds", "variants", "git", "versions", "hardware", "checks")


def main() -> None:
    """Print, and keep where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verdict", type=Path, help="verdict.json, or what was kept of one")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what the table needs")
    options = parser.parse_args()
    night = json.loads(options.verdict.read_text())
    if options.keep is not None:
        options.keep.write_text(json.dumps({key: night[key] for key in KEPT}, indent=1) + "\n")
    print(table(night))


def table(night: dict) -> str:
    """A row for each check and a column for each variant, in markdown; what did not pass says so."""
    found: dict[str, dict[str, str]] = {}
    for check in night["checks"]:
        if check["variant"] not in night["variants"]:
            continue  # The preflight is of no variant.
        words = check["found"] if check["outcome"] == "PASS" else f"{check['found']} ({check['outcome']})"
        found.setdefault(check["name"], {"bound": check["bound"]})[check["variant"]] = words
    columns = [*night["variants"], "bound"]
    rows = [[name, *(cells.get(column, "") for column in columns)] for name, cells in found.items()]
    head = [["", *columns], ["---"] * (len(columns) + 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])


if __name__ == "__main__":
    main()
