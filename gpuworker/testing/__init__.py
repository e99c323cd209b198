"""For tests of your own: time that stands still until told, a GPU that costs what you say, and schedulers run against both without a process.

`gpuworker.testing.comparison` puts schedulers side by side, as `gpuworker simulate` does. For an owner in this process use
`gpuworker.Worker(handler, in_process=True)`: the same ring, the same loop, in a thread.
"""

from gpuworker.testing.arrivals import mmpp, poisson, uniform
from gpuworker.testing.fakes import FakeClock, FakeGpu
from gpuworker.testing.optimum import optimum
from gpuworker.testing.outcome import Outcome, SimulatedBatch, Simulation
from gpuworker.testing.simulation import simulate
from gpuworker.testing.traces import Trace, read_trace, scaled

__all__ = [
    "FakeClock",
    "FakeGpu",
    "Outcome",
    "SimulatedBatch",
    "Simulation",
    "Trace",
    "mmpp",
    "optimum",
    "poisson",
    "read_trace",
    "scaled",
    "simulate",
    "uniform",
]
