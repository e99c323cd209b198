"""The application: the client is made at import time, so before the fork with --preload."""

import os
import sys

import msgspec

import gpuworker
from gpuworker.frontends.wsgi import make_app

service = make_app(gpuworker.connect(os.environ["TEST_WORKER"], connect_timeout_s=20))


def app(environ, start_response):
    if environ["PATH_INFO"] == "/modules":
        start_response("200 OK", [("Content-Type", "application/json")])
        return [msgspec.json.encode([name for name in sys.modules if name.split(".")[0] == "torch" or name == "model"])]
    return service(environ, start_response)


def tagged(environ, start_response):
    return app(environ, start_response)
