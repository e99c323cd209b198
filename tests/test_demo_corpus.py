"""The parts of the demo that need no model: its texts, its search, and how it splits a batch."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from examples.semantic_search import corpus, search
from examples.semantic_search.corpus import Entry, first_paragraph
from examples.semantic_search.handler import PASS_COST_TOKENS, passes

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def entries():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # deprecated modules are imported without a word
        return corpus.load()


def test_thousands_of_distinct_texts_sorted_by_name(entries):
    assert 4000 < len(entries) < 8000
    assert len({entry.text for entry in entries}) == len(entries)
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)


def test_texts_are_one_line_of_several_words(entries):
    for name, text in entries:
        assert name
        assert text == " ".join(text.split())
        assert len(text.split()) >= 3


def test_every_run_finds_the_same():
    def run(hash_seed):
        command = [sys.executable, "-W", "error", "-c", "from examples.semantic_search import corpus; print(corpus.load())"]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True, timeout=60).stdout

    assert run("1") == run("2")


def test_names_are_public(entries):
    assert not [name for name, _ in entries if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", ["argparse.ArgumentParser", "csv", "tempfile.mkdtemp", "smtplib.SMTP.send_message", "builtins.all"])
def test_well_known_names_are_there(entries, name):
    assert name in [entry.name for entry in entries]


@pytest.mark.parametrize("size", [400, 1500, 10**6])
def test_sample_keeps_what_the_questions_need(entries, size):
    sample = corpus.sample(entries, size)
    assert len(sample) == min(size, len(entries))
    members = set(sample)
    assert [entry for entry in entries if entry in members] == sample
    for _, wanted in search.CHECKED_QUESTIONS:
        assert [entry for entry in sample if search.names(entry, wanted)] == [entry for entry in entries if search.names(entry, wanted)]


def test_first_paragraph_passes_over_a_bare_signature():
    assert first_paragraph("getattr(object, name[, default]) -> value\n\nGet a named\n    attribute.\n\nMore.") == "Get a named attribute."
    assert first_paragraph("\n    Read a line.\n    Or two.\n    ") == "Read a line. Or two."
    assert first_paragraph("f(x)") == ""
    assert first_paragraph("") == ""


def test_top_gives_the_closest_first():
    vectors = np.eye(4, dtype=np.float32)
    question = np.array([0.1, 0.9, 0.0, 0.4], np.float32)
    assert [row for row, _ in search.top(question, vectors, 3)] == [1, 3, 0]
    assert search.top(question, vectors, 1) == [(1, pytest.approx(0.9))]
    assert len(search.top(question, vectors, 99)) == 4


def test_names_takes_parts_and_no_prefixes():
    assert search.names(Entry("csv", ""), "csv")
    assert search.names(Entry("csv.reader", ""), "csv")
    assert not search.names(Entry("csvkit.reader", ""), "csv")


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_passes_hold_each_text_once_with_little_padding(threads):
    lengths = [int(n) for n in np.random.default_rng(7).integers(3, 200, 64)]
    split = passes(lengths, threads)
    assert sorted(i for chosen in split for i in chosen) == list(range(64))
    for chosen in split:
        longest = max(lengths[i] for i in chosen)
        assert sum(longest - lengths[i] for i in chosen) <= PASS_COST_TOKENS
    assert passes([5], threads) == [[0]]
    assert passes([], threads) == []
