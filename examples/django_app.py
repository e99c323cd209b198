"""Django, one owner for all its processes. gunicorn -c examples/gunicorn_conf.py -k gthread --threads 8 examples.django_app:app

curl -s localhost:8000/lengths -d '["one", "three"]'
"""

import json

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

import gpuworker

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["localhost", "127.0.0.1"])
client = gpuworker.connect("measure")


def lengths(request):
    return JsonResponse(list(client.map(json.loads(request.body), timeout=5)), safe=False)  # batched with everybody else's


urlpatterns = [path("lengths", lengths)]
app = get_wsgi_application()
