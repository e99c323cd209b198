"""The application: imported before the fork with --preload, after it without."""

import io
import os

import gpuworker
from gpuworker.frontends.wsgi import make_app

service = make_app(gpuworker.connect(os.environ["TEST_WORKER"], connect_timeout_s=30))


def app(environ, start_response):
    """Passes a request on with the pid of this gunicorn worker, which the handler reports."""
    if environ["REQUEST_METHOD"] == "POST":
        body = b'["web", %d, %b]' % (os.getpid(), environ["wsgi.input"].read())
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
    return service(environ, start_response)
