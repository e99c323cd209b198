"""The demo: semantic search over the Python standard library. Run it with `make demo` or `python -m examples.semantic_search`."""
