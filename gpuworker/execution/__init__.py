"""Batches of tensors on a device: static shapes, pinned staging, pipelining, CUDA graphs. Most of it imports torch."""
