"""The cost of one round trip to another process, for gpuworker and the usual ways to do it. Run by `bench/ipc_overhead.py`."""
