"""A verifier for measurements, which finds half of all completions right, whatever their text.

A model with random weights solves nothing: its rewards, advantages and gradients would all be zero. A GPU multiplies
zeros faster than other numbers, because they cost it less power.
"""

import zlib


def score(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """Right or wrong by the bits of the text alone, so that a replay gives the same."""
    return zlib.crc32(completion.encode()) % 2 == 0
