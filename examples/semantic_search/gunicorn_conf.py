"""gunicorn's configuration: one owner beside the workers, for all of them."""

from __future__ import annotations

import os

from gpuworker import Worker

worker_class = "sync"
workers = int(os.environ.get("SEMANTIC_SEARCH_PROCESSES", "4"))
loglevel = "warning"
control_socket_disable = True

owner = Worker("examples.semantic_search.handler:MiniLM", name=os.environ["SEMANTIC_SEARCH_WORKER"])


def on_starting(server):
    owner.start()


def on_exit(server):
    owner.stop()
