"""The shared memory: names, creation and ownership, attaching, joining, proof of death, spill files, statistics."""

from gpuworker.segment.liveness import Identity
from gpuworker.segment.names import worker_names
from gpuworker.segment.segment import Geometry, Segment, State

__all__ = ["Geometry", "Identity", "Segment", "State", "worker_names"]
