"""Steady HTTP load on a server of which nothing may be lost, whatever becomes of its processes."""

import contextlib
import http.client
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor


class Load:
    """While its block lasts, callers ask one thing after the other, each with a connection of its own. Raises what went wrong for one of them.

    `cut`: connections that were closed before there was an answer; what was asked there is asked again, and the answers (`times`, how often the worker was asked
    that) must say that it had not reached the application. `refused`: connections that there was nobody to accept, so that nothing was sent.
    """

    def __init__(self, port, callers):
        self._port, self._callers, self._ids, self._end = port, callers, itertools.count(), threading.Event()
        self.answers, self.cut, self.refused = [], [], []

    def __enter__(self):
        self._pool = ThreadPoolExecutor(self._callers)
        self._running = [self._pool.submit(self._run) for _ in range(self._callers)]
        return self

    def __exit__(self, *_):
        self._end.set()
        self._pool.shutdown()
        for caller in self._running:
            caller.result()

    def has_failed(self):
        return any(caller.done() for caller in self._running)

    def _run(self):
        while not self._end.is_set():
            path = f"/{next(self._ids)}"
            while (answer := self._ask(path)) is None:
                assert self.cut.count(path) < 20, path
                assert self.refused.count(path) < 2000, path
            assert answer["times"] == 1, (path, answer)
            self.answers.append(answer)

    def _ask(self, path):
        """-> what the application answers; None if it was not asked."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            try:
                connection.connect()
            except ConnectionRefusedError:
                self.refused.append(path)
                self._end.wait(0.01)
                return None
            try:
                connection.request("GET", path, headers={"Connection": "close"})
                response = connection.getresponse()
            except ConnectionError:
                self.cut.append(path)
                return None
            body = response.read()
            assert response.status == 200, (path, response.status, body)
            return json.loads(body)
