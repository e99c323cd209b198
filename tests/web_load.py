"""Steady HTTP load on a server of which nothing may be lost, whatever becomes of its processes."""

import http.client
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor


class Load:
    """While its block lasts, callers ask one thing after the other, each with a connection of its own. Raises what went wrong for one of them.

    A connection that was closed before there was an answer is no failure if the application has not seen the request: then it is sent again, as any client
    would. `cut` are these; that the application has not seen them is said by the answers (`times`), which tell how often the worker was asked that.
    """

    def __init__(self, port, callers):
        self._port, self._callers, self._ids, self._end = port, callers, itertools.count(), threading.Event()
        self.answers, self.cut = [], []

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
            while (answer := self.ask(path)) is None:
                self.cut.append(path)
                assert self.cut.count(path) < 20, path
            assert answer["times"] == 1, (path, answer)
            self.answers.append(answer)

    def ask(self, path):
        """-> what the application answers; None if the connection was closed before."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
        except ConnectionError:
            return None
        finally:
            connection.close()
        body = response.read()
        assert response.status == 200, (path, response.status, body)
        return json.loads(body)
