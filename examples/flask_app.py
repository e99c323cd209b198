"""Flask, one owner for all its processes. gunicorn -c examples/gunicorn_conf.py -k gthread --threads 8 examples.flask_app:app

curl -s localhost:8000/lengths -H "Content-Type: application/json" -d '["one", "three"]'
"""

from flask import Flask, jsonify, request

import gpuworker

app = Flask(__name__)
client = gpuworker.connect("measure")


@app.post("/lengths")
def lengths():
    return jsonify(list(client.map(request.get_json(), timeout=5)))  # batched with everybody else's


@app.errorhandler(gpuworker.QueueFull)
def busy(error):
    return jsonify(error=str(error)), 503, {"Retry-After": "1"}
