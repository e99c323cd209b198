"""Statistics in Prometheus' text format: what there is (`families`), how it is written (`text`), and from whom it is read (`exposition`)."""

from gpuworker.metrics.exposition import render_metrics, which_are_up
from gpuworker.metrics.text import METRICS_CONTENT_TYPE

__all__ = ["METRICS_CONTENT_TYPE", "render_metrics", "which_are_up"]
