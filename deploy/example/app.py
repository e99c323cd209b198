"""The web application: POST / takes JSON and gives JSON, /healthz says how the worker is."""

import gpuworker
from gpuworker.frontends.wsgi import make_app

app = make_app(gpuworker.connect("embed", group="12000"))
