"""For Django's and Flask's applications here."""

from gpuworker.frontends.gunicorn import sidecar

workers = 2
on_starting, on_reload, on_exit = sidecar("examples.lengths:run_batch", name="measure")
