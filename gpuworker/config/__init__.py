"""A worker's settings from a TOML file, the environment and flags, by one rule: what is nearest to the start of the worker wins (layers.py)."""

from gpuworker.config.settings import WorkerConfig, load_config

__all__ = ["WorkerConfig", "load_config"]
