"""Statistics for Prometheus, for an application of one's own; frontends/wsgi.py has them at /metrics already.

    from gpuworker.frontends import metrics

    metrics.render(["embed"])           # bytes, to be sent as metrics.CONTENT_TYPE
    app = metrics.make_metrics_app()    # or a WSGI application that answers GET with them, to be mounted somewhere

They are read from shared memory, so any process of the user's may answer, and no owner is disturbed. docs/operations.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpuworker import METRICS_CONTENT_TYPE, render_metrics

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["CONTENT_TYPE", "make_metrics_app", "render"]

CONTENT_TYPE = METRICS_CONTENT_TYPE
render = render_metrics


def make_metrics_app(names: Sequence[str] | None = None, group: str | None = None) -> WSGIApplication:
    """A WSGI application that answers any GET with the metrics of these workers (default: of all of this user's), as they are then. group: as for
    gpuworker.connect, for workers of other users."""

    def metrics_app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Type", "text/plain"), ("Content-Length", "0")])
            return [b""]
        body = render(names, group)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return metrics_app
