"""Continuous batching over a paged KV cache: the unit of batching is one step of the model, and sequences join and leave between steps.

Who gets which blocks and tokens is decided here without torch (blocks, prefix, sequence, waiting, scheduler); the model is somebody else's business.
"""
