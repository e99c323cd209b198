"""The parts of frontends/asgi.py: the Open Inference Protocol, OpenAI's API, and what both of them need of HTTP."""
