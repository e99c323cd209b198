"""Semantic search: the texts whose vectors point the same way as the question's."""

from __future__ import annotations

import numpy as np

from .corpus import Entry

# Question, and the name (of an entry, or of the module it belongs to) that must be among the first five answers.
CHECKED_QUESTIONS = (
    ("parse command line arguments", "argparse"),
    ("read a csv file", "csv"),
    ("make a temporary directory", "tempfile.mkdtemp"),
    ("send an email over smtp", "smtplib"),
)


def top(question: np.ndarray, vectors: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The `count` rows of `vectors` closest to `question` by cosine, best first, as (row, cosine). All are of length 1."""
    cosines = vectors @ question
    best = np.argsort(-cosines, kind="stable")[:count]
    return [(int(row), float(cosines[row])) for row in best]


def names(entry: Entry, wanted: str) -> bool:
    """Whether the entry is what is wanted, or part of it: `smtplib.SMTP.send_message` of `smtplib`."""
    return entry.name == wanted or entry.name.startswith(f"{wanted}.")
