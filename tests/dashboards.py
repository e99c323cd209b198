"""A fixture: the status page, served."""

import threading

import pytest

from gpuworker.cli.dashboard import server_of


@pytest.fixture
def dashboard():
    """Serves the page of these workers; ends with the test."""
    started = []

    def start(*names, **where):
        server = server_of(names, **where)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()
