"""Verifiers for measurements: one finds half of all completions right, whatever their text, one is mistaken.

A model with random weights solves nothing: its rewards, advantages and gradients would all be zero. A GPU multiplies
zeros faster than other numbers, because they cost it less power.
"""

import zlib


def score(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """Right or wrong by the bits of the text alone, so that a replay gives the same."""
    return zlib.crc32(completion.encode()) % 2 == 0


def is_reference(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """A mistaken verifier: a completion has more than its answer."""
    return completion == reference
