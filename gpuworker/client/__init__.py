"""What a frontend process imports: numpy and the native ring, never torch."""

from gpuworker.client.client import Client, connect
from gpuworker.client.pending import Pending

__all__ = ["Client", "Pending", "connect"]
