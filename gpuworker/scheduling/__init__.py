"""Pure policy: which requests leave now. No clock, no I/O, no threads, no torch; time is an argument, in nanoseconds."""

from gpuworker.scheduling.decision import Decision, Policy, Queued, Reason, Run, Wait
from gpuworker.scheduling.size_or_timeout import SizeOrTimeout

__all__ = ["Decision", "Policy", "Queued", "Reason", "Run", "SizeOrTimeout", "Wait"]
