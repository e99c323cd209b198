"""The web application that gunicorn's workers run. None of them holds a model: all call the one owner."""

import os

from gpuworker.frontends.wsgi import make_app

app = make_app(os.environ["SEMANTIC_SEARCH_WORKER"])  # POST a JSON string, get its vector as a JSON list of 384 numbers
