"""For gevent: a wait would hold up all greenlets, so it is left to the hub's threads."""

import json
import os

import gevent

import gpuworker

client = gpuworker.connect("embed", connect_timeout_s=30)


def submit(request):
    return gevent.get_hub().threadpool.apply(client.submit, (request,), {"timeout": 60})


def app(environ, start_response):
    body = json.dumps(submit(["web", os.getpid(), environ["PATH_INFO"]])).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
