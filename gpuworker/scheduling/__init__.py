"""Pure policy: which requests leave now. No clock, no I/O, no threads, no torch; time is an argument, in nanoseconds."""

from gpuworker.scheduling.decision import Decision, Policy, Queued, Reason, Run, RunTimes, Scheduler, Wait
from gpuworker.scheduling.fifo import Fifo
from gpuworker.scheduling.joint_budget import JointBudget
from gpuworker.scheduling.run_times import KnownRunTimes
from gpuworker.scheduling.size_or_timeout import SizeOrTimeout

__all__ = ["Decision", "Fifo", "JointBudget", "KnownRunTimes", "Policy", "Queued", "Reason", "Run", "RunTimes", "Scheduler", "SizeOrTimeout", "Wait"]
