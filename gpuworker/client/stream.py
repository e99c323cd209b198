"""An answer that comes piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuworker._native import lib
from gpuworker.client.link import Ending, Link
from gpuworker.client.locks import Lock
from gpuworker.client.order import Order
from gpuworker.client.text import StopStrings
from gpuworker.errors import RemoteError, RequestCancelled, SegmentError
from gpuworker.generating import FINISH, NO_TOKEN


class TokenLogprob(NamedTuple):
    """A token's natural logarithm of its probability, and the likeliest tokens there with theirs, as many as were asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Usage(NamedTuple):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int


class Delta(NamedTuple):
    """What has come since the one before: `tokens` with their `logprobs` (None if not asked for), and the text that is final now, which may be behind them."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    finish_reason: "stop": a token or a string that ends it; "length": max_tokens. tokens: all that were generated, with the token that ended it, if one did, and
    those that a stop string was made of; `text` has neither.
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    logprobs: list[TokenLogprob] | None
    usage: Usage


class Stream(Iterator[Delta]):
    """The answer to one request, as it is generated; made by `Client.stream`. For one reader; `cancel` may be called from any thread.

        with client.stream("Once upon a time") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.result().finish_reason)

    A slow reader holds up nobody and loses nothing: what it has not read waits in the request's slot. A stream that is dropped, or whose block is left, withdraws
    its request. Reading raises what `Client.submit` would: DeadlineExceeded, WorkerDied, RequestCancelled, ...; then the slot is given back, and it is over.
    """

    def __init__(self, link: Link, ticket: int, order: Order, deadline_ns: int) -> None:
        self._link, self._ticket, self._order, self._deadline_ns = link, ticket, order, deadline_ns
        self._lock = Lock()
        self._seen = 0
        self._stops = StopStrings(order.stops)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if "logprob" in (order.entry.names or ()) else None
        self._error: Exception | None = None
        self._generation: Generation | None = None
        self._over = False  # last: from here on __del__ looks after the slot

    @property
    def generation(self) -> Generation | None:
        """The whole answer, once it has been read to its end."""
        return self._generation

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        delta: Delta | None = self._read(at_once=False)
        if delta is None:
            raise StopIteration
        return delta

    def result(self) -> Generation:
        """Reads to the end, and returns all of it."""
        while self._read(at_once=not self._order.stops) is not None:
            pass
        assert self._generation is not None
        return self._generation

    def cancel(self) -> bool:
        """Withdraws the request: the owner drops it before its next step. True if it was not over; then reading raises RequestCancelled."""
        if self._over or not self._link.withdraw(self._ticket):
            return False
        lib.gw_count_client(self._link.port, lib.GW_CANCELLED)
        return True

    def close(self) -> None:
        """Gives its slot back now, whether or not it was read to its end."""
        if not self._over and not self.cancel():
            self._link.abandon(self._ticket)
        if not self._over:
            self._error, self._over = RequestCancelled("the stream was closed"), True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._link.abandon(self._ticket)

    def __repr__(self) -> str:
        state = "open" if not self._over else self._generation.finish_reason if self._generation is not None else f"failed: {self._error!r}"
        return f"<gpuworker.Stream, {len(self._tokens)} tokens, {state}>"

    def poll(self, at_once: bool, ask: bool) -> Delta | Literal["not yet"] | None:
        """As reading on, without waiting. at_once: as for `result`. ask: also whether the owner lives, if there is nothing."""
        delta: Delta | Literal["not yet"] | None = self._read(at_once, wait=False, ask=ask)
        return delta

    @property
    def has_stops(self) -> bool:
        """Whether a string may end it."""
        return bool(self._order.stops)

    def awaited(self, at_once: bool) -> tuple[int, int, int]:
        """-> what `poll` says "not yet" of: (ticket, how many entries there have to be more than, deadline on CLOCK_MONOTONIC in ns or 0)."""
        return self._ticket, lib.GW_TO_THE_END if at_once else self._seen, self._deadline_ns

    def _read(self, at_once: bool, wait: bool = True, ask: bool = True) -> Any:
        """The next delta, None at the end. at_once: rather all that is left than a little."""
        if self._link.pid != os.getpid():  # asked first: a thread that does not exist here may have held the lock
            raise SegmentError("this request belongs to another process (it was made before a fork)")
        with self._lock:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            try:
                return self._next(at_once, wait, ask)
            except BaseException as error:  # also Ctrl-C between any two lines here: what has been read is then known to nobody
                self._link.abandon(self._ticket)
                self._error = error if isinstance(error, Exception) else RequestCancelled("reading the answer was interrupted")
                self._over = True
                raise

    def _next(self, at_once: bool, wait: bool, ask: bool) -> Delta | Literal["not yet"] | None:
        order = self._order
        until = max(order.max_tokens, self._seen) if at_once else self._seen
        found = self._link.follow(self._ticket, self._seen, until, order.entry.itemsize, self._deadline_ns, wait, ask)
        if found is None:
            return "not yet"
        if isinstance(found, Ending):
            return self._end(found)
        entries = np.frombuffer(found, order.entry)
        self._seen += len(entries)
        if self._seen > order.max_tokens:
            raise SegmentError(f"malformed answer: {self._seen} tokens, and {order.max_tokens} were asked for")
        return self._take(entries)

    def _take(self, entries: Any) -> Delta:
        order, had, pieces = self._order, len(self._tokens), []
        for token in entries["token"].tolist():
            if not 0 <= token < order.vocabulary:
                raise SegmentError(f"malformed answer: there is no token {token}")
            self._tokens.append(token)
            if order.detokenizer is None or token in order.ending_ids:
                continue
            piece, is_over = self._stops.add(order.detokenizer.add(token))
            pieces.append(piece)
            if is_over:
                self._link.satisfied(self._ticket)  # first of all: its blocks are of use to others
                break
        else:
            is_over = False
        count = len(self._tokens) - had
        logprobs = None
        if self._logprobs is not None:
            logprobs = _logprobs_of(entries[:count], order.vocabulary)
            self._logprobs += logprobs
        text = "".join(pieces)
        self._text.append(text)
        if is_over:
            self._finish("stop")
        return Delta(text, self._tokens[had:], logprobs)

    def _end(self, ending: Ending) -> Delta | None:
        reason = FINISH[ending.finish] if ending.finish < len(FINISH) else ""
        if reason == "error":
            raise RemoteError("Exception", "the owner could not describe the error")
        if reason not in ("stop", "length") or ending.completion_tokens != self._seen:
            raise SegmentError(f"malformed answer: {ending} after {self._seen} tokens")
        detokenizer = self._order.detokenizer
        text, is_over = self._stops.add(detokenizer.end() if detokenizer is not None else "")
        if not is_over:
            text += self._stops.end()
        self._text.append(text)
        self._finish("stop" if is_over or reason == "stop" else "length")
        return Delta(text, [], None if self._logprobs is None else []) if text else None

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        usage = Usage(self._order.prompt_tokens, len(self._tokens))
        self._generation = Generation("".join(self._text), self._tokens, reason, self._logprobs, usage)
        self._over = True


def _logprobs_of(entries: Any, vocabulary: int) -> list[TokenLogprob]:
    tokens, logprobs = entries["token"].tolist(), entries["logprob"].tolist()
    if "top_ids" not in entries.dtype.names:
        return [TokenLogprob(token, logprob, []) for token, logprob in zip(tokens, logprobs, strict=True)]
    if entries["top_ids"].size and not NO_TOKEN <= entries["top_ids"].min() <= entries["top_ids"].max() < vocabulary:
        raise SegmentError("malformed answer: a likely token that there is not")
    tops = zip(entries["top_ids"].tolist(), entries["top_logprobs"].tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, [one for one in zip(*top, strict=True) if one[0] != NO_TOKEN])
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
