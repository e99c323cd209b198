"""For servers whose requests have threads or processes of their own."""

import json
import os

import gpuworker

client = gpuworker.connect("embed", connect_timeout_s=30)


def app(environ, start_response):
    body = json.dumps(client.submit(["web", os.getpid(), environ["PATH_INFO"]], timeout=60)).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
