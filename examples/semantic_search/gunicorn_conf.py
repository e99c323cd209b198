"""gunicorn's configuration: workers and, beside them, one owner for all of them."""

import os

from gpuworker.frontends.gunicorn import sidecar

on_starting, on_reload, on_exit = sidecar("examples.semantic_search.handler:MiniLM", name=os.environ["SEMANTIC_SEARCH_WORKER"])

worker_class = "sync"
workers = int(os.environ["SEMANTIC_SEARCH_PROCESSES"])
loglevel = "warning"
control_socket_disable = True
