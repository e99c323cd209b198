"""The web application that gunicorn's workers run. None of them holds a model: all call the one owner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import gpuworker

client = gpuworker.connect(os.environ["SEMANTIC_SEARCH_WORKER"])


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """POST a JSON string, get its vector as a JSON list of 384 numbers. GET: 200 once the owner answers."""
    text = "healthy?"
    if environ["REQUEST_METHOD"] == "POST":
        text = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    body = json.dumps(client.submit(text).tolist()).encode()
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
