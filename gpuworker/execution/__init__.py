"""Batches of tensors on a device: static shapes, pinned staging, pipelining, CUDA graphs. Everything but grid.py imports torch."""
