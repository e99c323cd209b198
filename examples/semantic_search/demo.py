"""Semantic search over the Python standard library: one model in one owner process, called by gunicorn workers and forked processes at once.

Exits with 0 only if every text was embedded, the vectors compared equal what the model gives for the text alone, and each question found its answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import sys
import textwrap
import time

import numpy as np

import gpuworker
from gpuworker.segment.stats import Stats

from . import corpus, search
from .baseline import own_model
from .fleet import FleetError, Way, embed_all
from .model import PACKAGE
from .report import Row, report
from .service import running
from .show import progress, say
from .usage import cores

MEASURED_TEXTS = 300
TOLERANCE = 1e-5  # per number of a vector: batching and padding change the order of float32 sums, and nothing else


class WrongAnswerError(Exception):
    """The demo ran, and what it found is not what it must find."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.semantic_search", description=__doc__)
    parser.add_argument("--all", action="store_true", help="embed all texts (about 5,500)")
    parser.add_argument("--texts", type=int, default=1500, help="how many to embed otherwise (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="gunicorn workers, and forked processes (default: %(default)s)")
    options = parser.parse_args()
    # For every process from here on: torch's threads sleep while they wait for each other. Where more processes than cores want to run, spinning instead makes
    # each pass through a model up to 25 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every process started is ended
    started = time.monotonic()
    try:
        run(options.all, options.texts, options.processes)
    except KeyboardInterrupt:
        say("\nInterrupted.")
        return 128 + signal.SIGINT
    except (WrongAnswerError, FleetError, gpuworker.GpuWorkerError, OSError) as error:
        say(f"\nFAILED: {error}")
        return 1
    except ModuleNotFoundError as error:
        say(f"\nFAILED: {error}. The demo needs its packages: pip install -e '.[demo]'")
        return 1
    say(f"All right, in {time.monotonic() - started:.0f} s.")
    return 0


def run(everything: bool, size: int, processes: int) -> None:
    """Raises WrongAnswerError, FleetError or what gpuworker raises."""
    torch, model = (importlib.metadata.version(package) for package in ("torch", PACKAGE))
    say(f"{cores()} cores ({platform.machine()}), Python {platform.python_version()}, torch {torch}; MiniLM ({PACKAGE} {model}) on the CPU")
    entries = corpus.load()
    found = len(entries)
    entries = entries if everything else corpus.sample(entries, size)
    say(f"{len(entries)} of {found} texts: first paragraphs of the standard library's docstrings")
    texts = [entry.text for entry in entries]
    few = range(0, len(texts), -(-len(texts) // MEASURED_TEXTS))
    few_texts = [texts[index] for index in few]

    name = f"semantic-search-{os.getpid()}"
    client = gpuworker.connect(name, on_full="block")  # made here, used here and in every process forked below
    say(f"Starting gunicorn with {processes} workers and, beside them, the one owner of the model")
    with running(name, processes) as service:
        owner = Stats.of(name).owner_pid
        say(f"  http://127.0.0.1:{service.port}/ is ready; process {owner} owns the model")
        forked = Way(f"{processes} forked", processes, lambda: lambda asked: map(client.submit, asked), (owner,))
        ahead = Way(f"{processes} forked, client.map", processes, lambda: client.map, (owner,))
        web = Way(f"{processes} gunicorn, HTTP", processes, service.open, service.pids(), outside=True)

        rows, vectors = [], []
        say("Embedding from forked processes and gunicorn workers at once, through one ring")
        at_once, all_vectors = measure(f"{processes} forked + {processes} gunicorn", texts, [forked, web], name)
        check_answers(client, entries, all_vectors)
        say("Each way alone, and against them processes that each own a model")
        for way in (forked, ahead, web):
            row, found_vectors = measure(way.label, few_texts, [way], name)
            rows.append(row)
            vectors.append(found_vectors)
    own = own_model(processes)
    alone, expected = measure(own.label, few_texts, [own])
    check_vectors([all_vectors[few], *vectors], expected)
    report(at_once, rows, own=alone)


def measure(label: str, texts: list[str], ways: list[Way], worker: str | None = None) -> tuple[Row, np.ndarray]:
    """Embeds the texts: the row of the table and the vectors. Without a `worker` there are no batches: 1 is their size."""
    before = Stats.of(worker) if worker else None
    with progress(label, len(texts)) as advance:
        result = embed_all(texts, ways, advance)
    batch = 1.0
    if worker and before:
        after = Stats.of(worker)
        batch = (after.completed - before.completed) / (after.batches - before.batches)
    return Row.of(label, result, batch), result.vectors


def check_answers(client: gpuworker.Client, entries: list[corpus.Entry], vectors: np.ndarray) -> None:
    """Asks the questions; raises WrongAnswerError when one does not find what it must."""
    missed = []
    for question, wanted in search.CHECKED_QUESTIONS:
        say(f"\n? {question}")
        answers = [(entries[row], cosine) for row, cosine in search.top(client.submit(question), vectors, 5)]
        for entry, cosine in answers:
            mark = "*" if search.names(entry, wanted) else " "
            say(f"{mark} {cosine:.2f}  {entry.name}: {textwrap.shorten(entry.text, 90 - len(entry.name), placeholder=' ...')}")
        if not any(search.names(entry, wanted) for entry, _ in answers):
            missed.append(f"{wanted} is not among the first five answers to {question!r}")
    say()
    if missed:
        raise WrongAnswerError("; ".join(missed))


def check_vectors(found: list[np.ndarray], expected: np.ndarray) -> None:
    """Raises WrongAnswerError when a vector is not what the model gave for the same text alone, in another process."""
    worst = max(float(np.abs(vectors - expected).max()) for vectors in found)
    if not worst <= TOLERANCE:
        raise WrongAnswerError(f"a vector differs by {worst:.1e} from the one that the model gives for the text alone (allowed: {TOLERANCE:.0e})")
    say(f"{len(found) * len(expected)} vectors agree with those that other processes computed text by text: largest difference {worst:.1e}\n")
