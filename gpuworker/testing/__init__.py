"""For tests of your own: time that stands still until told, a GPU that costs what you say, and policies run against both without a process.

For an owner in this process use `gpuworker.Worker(handler, in_process=True)`: the same ring, the same loop, in a thread.
"""

from gpuworker.testing.fakes import FakeClock, FakeGpu
from gpuworker.testing.simulation import SimulatedBatch, simulate

__all__ = ["FakeClock", "FakeGpu", "SimulatedBatch", "simulate"]
