"""A gunicorn configuration with hooks of its own beside the sidecar's."""

import json
import os
import sys

from gpuworker.frontends.gunicorn import sidecar

with open(os.environ["TEST_OPTIONS"]) as file:  # read again on HUP, as this whole file is
    options = json.load(file)
workers, preload_app = options.pop("workers"), options.pop("preload")
pidfile = os.environ["TEST_OPTIONS"] + ".pid"
control_socket_disable = True
worker_tmp_dir = "/dev/shm"
graceful_timeout = 60
timeout = 60

embed = sidecar(name=os.environ["TEST_WORKER"], **options)
on_starting, on_reload = embed.on_starting, embed.on_reload


def post_fork(server, worker):
    foreign = {name for name in sys.modules if name.split(".")[0] in ("torch", "model", "multiprocessing")}  # what the master imported
    assert not foreign, foreign


def on_exit(server):
    embed.on_exit(server)
    server.log.info("The configuration's own on_exit ran after the owner's end")
