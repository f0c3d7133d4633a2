"""Evaluation files of llm.c."""

import struct
from pathlib import Path

import numpy as np

V = 61
Example = tuple[int, list[int], list[list[int]]]  # label, context, completions


def write_evaluation(path: Path, examples: list[Example]) -> None:
    """Writes the file as llm.c's write_evalfile lays it out."""
    body = []
    for index, (label, context, completions) in enumerate(examples):
        parts = [part for tokens in (context, *completions) for part in (len(tokens), *tokens)]
        head = 65535, 2 * (5 + len(parts)), index, label, len(completions)
        body.append(np.array([*head, *parts], "<u2").tobytes())
    header = struct.pack("<4i", 20240522, 1, len(examples), max(map(len, body)))
    path.write_bytes(header.ljust(1024, b"\0") + b"".join(body))


def random_examples(rng: np.random.Generator, count: int, longest: int = 16) -> list[Example]:
    """With at most `longest` tokens in a context and a completion."""
    examples = []
    for _ in range(count):
        context = rng.integers(0, V, rng.integers(1, longest // 2)).tolist()
        lengths = rng.integers(1, longest - len(context) + 1, 4)
        examples.append((int(rng.integers(4)), context, [rng.integers(0, V, n).tolist() for n in lengths]))
    return examples
