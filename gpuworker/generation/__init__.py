"""Continuous batching over a paged KV cache: the unit of batching is one step of the model, and sequences join and leave between steps.

Which sequences a step works on, and whose the blocks are, is decided without torch: blocks, prefix, sequence, waiting, scheduler. The other modules do the step.
"""
