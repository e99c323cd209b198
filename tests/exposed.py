"""Statistics of a worker that has everything, and Prometheus' text as its own parser reads it."""

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from gpuworker.metrics.families import FAMILIES, UP, is_up
from gpuworker.metrics.text import Writer, heading
from gpuworker.segment.execution import COUNTERS as EXECUTION_COUNTERS
from gpuworker.segment.execution import Execution
from gpuworker.segment.generation import COUNTERS as GENERATION_COUNTERS
from gpuworker.segment.generation import Generation


def samples(text):
    """{(name, labels without `worker`): value} of one worker's samples."""
    return {
        (s.name, tuple(sorted(label for label in s.labels.items() if label[0] != "worker"))): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


def value(text, name, **labels):
    return samples(text)[name, tuple(sorted(labels.items()))]


def with_everything(worker):
    """An in-process worker's statistics, as if it also served tensors and generated."""
    return dataclasses.replace(
        worker.stats(),
        execution=Execution.of(range(1, 1 + len(EXECUTION_COUNTERS))),
        generation=Generation.of(range(1, 1 + len(GENERATION_COUNTERS))),
    )


def text_of(*stats):
    """As gpuworker.render_metrics makes it."""
    up = [f'{UP.name}{{worker="{s.name}"}} {is_up(s)}\n' for s in stats]
    return "".join([heading(UP), *up, Writer(FAMILIES).write(stats)]).encode()
