"""Write docs/schemas/run.json, which editors check configuration files with.

    python docs/generate_config_schema.py

A test fails where it is out of date. A file names the schema in its first line, as those in configs/ do.
"""

import json
from pathlib import Path

from fp8core.config.load import file_schema

SCHEMA = Path(__file__).parent / "schemas" / "run.json"


def main() -> None:
    SCHEMA.write_text(text())


def text() -> str:
    """The text of the file."""
    return json.dumps(file_schema(), indent=2) + "\n"


if __name__ == "__main__":
    main()
