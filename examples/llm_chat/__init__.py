"""The demo of generation: one language model in one owner, streamed to many processes at once. Run it with `make demo-llm` or `python -m examples.llm_chat`."""
