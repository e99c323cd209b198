"""Applications of the library for web servers: a gunicorn sidecar and a WSGI application."""
