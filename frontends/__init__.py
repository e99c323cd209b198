"""Applications of the library for web servers: a gunicorn sidecar, a WSGI application and an ASGI application."""
