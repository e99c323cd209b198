"""Forked frontends that stream at once; tokens, their times and the text so far land in memory that they share with their parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import gpuworker
from examples.semantic_search.fleet import FleetError, end_with_parent, fork, shared_array
from examples.semantic_search.usage import cpu_s, machine_cpu_s
from gpuworker.segment.stats import Stats

from .work import Request

READY_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 10.0
HEAD_BYTES = 240
LOOK_S = 0.1


class Board:
    """What all processes see. tokens, times_ns: of each request, one by one; text: how its answer begins, in UTF-8."""

    def __init__(self, requests: Sequence[Request], frontends: int) -> None:
        count, most = len(requests), max(request.max_tokens for request in requests)
        self.tokens, self.times_ns = shared_array((count, max(most, 1)), np.int32), shared_array((count, max(most, 1)), np.int64)
        self.came, self.prompt_tokens = shared_array((count,), np.int64), shared_array((count,), np.int64)
        self.sent_ns, self.done_ns = shared_array((count,), np.int64), shared_array((count,), np.int64)
        self.most = np.array([request.max_tokens for request in requests])
        self.heads, self.reader = shared_array((count, HEAD_BYTES), np.uint8), shared_array((count,), np.int64)
        self.cpu_ns = shared_array((frontends,), np.int64)

    def head(self, request: int) -> str:
        """How the answer begins."""
        return bytes(self.heads[request]).rstrip(b"\0").decode(errors="ignore")


@dataclass(frozen=True)
class Served:
    """Everything that came. Times are of CLOCK_MONOTONIC; a token's is when its frontend had it. cpu_s: of all processes that took part, frontends included;
    foreign: cores that others used meanwhile."""

    tokens: list[list[int]]
    times_ns: list[list[int]]
    sent_ns: list[int]
    prompt_tokens: list[int]
    heads: list[str]
    seconds: float
    cpu_s: float
    owner_cpu_s: float
    foreign: float

    @property
    def count(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.tokens))

    def first_ms(self) -> list[float]:
        """From sending to the first token, for each request that has one."""
        return [(times[0] - sent) / 1e6 for times, sent in zip(self.times_ns, self.sent_ns, strict=True) if times]

    def between_ms(self) -> list[float]:
        """From each token to the next of the same request."""
        return [(after - before) / 1e6 for times in self.times_ns for before, after in pairwise(times)]


def serve(
    worker: str,
    requests: Sequence[Request],
    *,
    frontends: int,
    at_s: Sequence[float] | None = None,
    watch: Callable[[Board], None] = lambda board: None,
) -> Served:
    """Streams every request once, each from a thread of its own in one of the forked frontends: all at once, or request i at at_s[i] seconds. Calls `watch` ten
    times a second. The calling process must not have torch's threads: it forks. Raises FleetError."""
    board = Board(requests, frontends)
    client = gpuworker.connect(worker, on_full="block")
    owner = Stats.of(worker).owner_pid
    together = fork.Barrier(frontends + 1)
    members = [
        fork.Process(target=_member, args=(client, requests, number, frontends, at_s, board, together, os.getpid()), daemon=True)
        for number in range(frontends)
    ]
    try:
        for process in members:
            process.start()
        try:
            together.wait(READY_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise FleetError("a process could not get ready") from None
        began_s, machine_before, owner_before = time.monotonic(), machine_cpu_s(), cpu_s([owner])
        while not board.done_ns.all():
            watch(board)
            time.sleep(LOOK_S)
            if any(process.exitcode for process in members):
                raise FleetError("a process failed while it was streaming")
        watch(board)
        seconds = (int(board.done_ns.max()) - int(began_s * 1e9)) / 1e9
        together.wait(LEAVE_TIMEOUT_S)
        looked_s = time.monotonic() - began_s
        owner_cpu_s, machine = cpu_s([owner]) - owner_before, machine_cpu_s() - machine_before
        for process in members:
            process.join(LEAVE_TIMEOUT_S)
    finally:
        for process in members:
            if process.pid:
                process.kill()
                process.join()
        client.close()
    all_cpu_s = owner_cpu_s + float(board.cpu_ns.sum()) / 1e9
    came = board.came.tolist()
    return Served(
        [board.tokens[i, :n].tolist() for i, n in enumerate(came)],
        [board.times_ns[i, :n].tolist() for i, n in enumerate(came)],
        board.sent_ns.tolist(),
        board.prompt_tokens.tolist(),
        [board.head(i) for i in range(len(requests))],
        seconds,
        all_cpu_s,
        owner_cpu_s,
        max(0.0, machine - all_cpu_s) / looked_s,
    )


def _member(
    client: gpuworker.Client,
    requests: Sequence[Request],
    number: int,
    frontends: int,
    at_s: Sequence[float] | None,
    board: Board,
    together: threading.Barrier,
    parent: int,
) -> None:
    """What frontend `number` does: every so many-th request."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    mine = range(number, len(requests), frontends)
    try:
        warm(client, [requests[i] for i in mine])
    except BaseException:
        together.abort()
        raise
    together.wait()
    start_s, before_ns = time.monotonic(), time.process_time_ns()
    failed: list[BaseException] = []

    def stream(i: int) -> None:
        if at_s is not None:
            time.sleep(max(0.0, start_s + at_s[i] - time.monotonic()))
        try:
            _stream(client, requests[i], i, number, board)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=stream, args=(i,)) for i in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        os._exit(1)  # its traceback is on stderr
    board.cpu_ns[number] = time.process_time_ns() - before_ns
    together.wait()


def warm(client: gpuworker.Client, requests: Iterable[Request]) -> None:
    """Reads the tokenizer, and joins the worker, before the clock starts."""
    for request in list(requests)[:1]:
        client.generate(request.prompt, max_tokens=0)


def _stream(client: gpuworker.Client, request: Request, i: int, number: int, board: Board) -> None:
    board.sent_ns[i], board.reader[i] = time.monotonic_ns(), number
    text = b""
    with client.stream(request.prompt, max_tokens=request.max_tokens, ignore_eos=True) as stream:
        for delta in stream:
            now_ns, came = time.monotonic_ns(), int(board.came[i])
            board.tokens[i, came : came + len(delta.tokens)] = delta.tokens
            board.times_ns[i, came : came + len(delta.tokens)] = now_ns
            board.came[i] = came + len(delta.tokens)
            if len(text) < HEAD_BYTES and delta.text:
                text = (text + delta.text.encode())[:HEAD_BYTES]
                board.heads[i, : len(text)] = np.frombuffer(text, np.uint8)
        generation = stream.result()
    board.prompt_tokens[i] = generation.usage.prompt_tokens
    board.done_ns[i] = time.monotonic_ns()
