"""The stored rows of measurements, and the words that tables have for what is in them."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PRECISIONS = {
    "bf16": "BF16",
    "fp8_linear": "FP8 linears",
    "fp8_linear_kv": "FP8 linears, cache and attention",
}
MODELS = {"qwen3-8b": "Qwen3-8B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}

Row = dict[str, Any]


def stored(name: str) -> list[Row]:
    """The rows of a file of results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows
