"""One frontend: asks in every way there is, checks each answer, and writes down how each request ended."""

import random
import time

import gpuworker
from tests.soak.records import EXPECTED
from tests.soak.work import Requests, answer, is_right

PATIENCE_S = 60.0
"""Longer than the driver waits before it calls a request lost."""


class Frontend:
    def __init__(self, worker_name, records, place, serial):
        self.name, self.records, self.place = worker_name, records, place
        self.chance = random.Random(serial)
        self.requests = Requests(self.chance, serial)
        self.client = self._connect()

    def _connect(self):
        return gpuworker.connect(self.name, on_full=self.chance.choice(("reject", "block")), wake=self.chance.choice((None, "park", "adaptive")))

    def run(self):
        """Until the driver says that it is over, or kills this process."""
        ways = (self.submit,) * 8 + (self.many, self.many, self.map, self.reserve, self.cancel, self.expire, self.expire, self.drop, self.leave)
        while not self.records.is_over:
            self.chance.choice(ways)()

    # Bookkeeping.

    def ask(self, call, request, n=1):
        """Makes a call that sends `n` requests: what it returned, or None when they have ended in an error."""
        self.records.add(self.place, "sent", n)
        return self.await_(call, request, n)

    def await_(self, call, request, n=1):
        """Makes a call that ends `n` requests if it raises."""
        self.records.begin(self.place, time.monotonic_ns())
        try:
            return call()
        except Exception as error:
            self.ended(request, error, n)
            return None
        finally:
            self.records.end(self.place, time.monotonic_ns())

    def ended(self, request, result, n=1):
        """With a value or an exception."""
        expected = answer(request, here=True)
        if is_right(expected, result):
            self.records.add(self.place, "right", n)
        elif isinstance(result, gpuworker.GpuWorkerError) and (not isinstance(result, gpuworker.RemoteError) or result.type.endswith("SoakError")):
            self.records.add(self.place, type(result).__name__, n)
            if type(result).__name__ not in EXPECTED:
                self.records.note(self.place, f"{type(result).__name__}: {result}")
        else:
            self.records.add(self.place, "wrong", n)
            self.records.note(self.place, f"wrong: asked {str(request)[:200]!r}, expected {str(expected)[:200]!r}, got {result!r:.1000}")

    # Ways to ask.

    def some_request(self):
        pick, requests = self.chance.random(), self.requests
        if pick < 0.85:
            return requests.small()
        if pick < 0.90:
            return requests.failing()
        if pick < 0.94:
            return requests.slow()
        return requests.spilled() if pick < 0.97 else requests.large()

    def submit(self):
        for _ in range(5):
            request = self.some_request()
            result = self.ask(lambda r=request: (self.client.submit(r, timeout=PATIENCE_S),), request)
            if result is not None:
                self.ended(request, *result)

    def many(self):
        waiting = []
        for _ in range(self.chance.randrange(1, 12)):
            request = self.some_request()
            pending = self.ask(lambda r=request: self.client.enqueue(r, timeout=PATIENCE_S), request)
            if pending is not None:
                waiting.append((request, pending))
        self.chance.shuffle(waiting)
        for request, pending in waiting:
            result = self.await_(lambda p=pending: (p.result(),), request)
            if result is not None:
                self.ended(request, *result)

    def map(self):
        asked = [self.requests.small() for _ in range(self.chance.randrange(1, 20))]
        self.records.add(self.place, "sent", len(asked))
        answers = self.client.map(asked, timeout=PATIENCE_S)
        for i, request in enumerate(asked):
            result = self.await_(lambda: (next(answers),), request)
            if result is None:  # the first error ends a map
                self.records.add(self.place, "dropped", len(asked) - i - 1)
                return
            self.ended(request, *result)

    def reserve(self):
        model = self.requests.array()

        def fill_and_submit():
            with self.client.reserve(model.shape, model.dtype, timeout=PATIENCE_S) as array:
                array[:] = model
                return (self.client.submit(array, timeout=PATIENCE_S),)

        result = self.ask(fill_and_submit, model)
        if result is not None:
            self.ended(model, *result)

    def cancel(self):
        request = self.requests.slow() if self.chance.random() < 0.5 else self.some_request()
        pending = self.ask(lambda: self.client.enqueue(request), request)
        if pending is None:
            return
        if self.chance.random() < 0.5:
            time.sleep(self.chance.random() / 500)
        pending.cancel()
        result = self.await_(lambda: (pending.result(),), request)
        if result is not None:
            self.ended(request, *result)

    def expire(self):
        request = self.requests.slow(30)
        result = self.ask(lambda: (self.client.submit(request, timeout=self.chance.random() / 50),), request)
        if result is not None:
            self.ended(request, *result)

    def drop(self):
        request = self.some_request()
        if self.ask(lambda: self.client.enqueue(request), request) is not None:
            self.records.add(self.place, "dropped")

    def leave(self):
        """Says goodbye with a request on its way, and comes back."""
        request = self.some_request()
        pending = self.ask(lambda: self.client.enqueue(request), request)
        self.client.close()
        self.client = self._connect()
        if pending is not None:
            result = self.await_(lambda: (pending.result(),), request)
            if result is not None:
                self.ended(request, *result)
