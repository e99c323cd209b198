"""Every metric that a worker can have, in the order in which they are written. docs/operations.md lists them; a test compares the two."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from gpuworker.metrics.device import DEVICE
from gpuworker.metrics.generation import GENERATION
from gpuworker.metrics.kinds import COUNTER, GAUGE, counter, each, gauge, histogram, names_of, times
from gpuworker.metrics.text import Family, Row, escaped
from gpuworker.segment import State
from gpuworker.segment.stats import REASONS, Stats

WAKES = (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24)
"""1 us to 4 s, finest from 4 us to 1 ms: waits that another process ends."""
RUNS = (6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 25, 27)
"""16 us to 34 s, finest from 0.3 ms to 2 s: batches, and waits for them."""
SIZES = (1, 2, 4, 8, 16, 32, 63, 127, 255, 511, 1023, 2047, 4095)
"""The segment counts sizes from 64 on by octave."""
STATES = names_of(State)


def is_up(stats: Stats) -> int:
    """Whether the worker can be sent requests, now or as soon as its next owner has loaded."""
    return int(stats.alive and stats.state not in ("stopped", "superseded", "failed"))


def _sizes(stats: Stats) -> Sequence[float]:
    counts, total = [0] * (len(SIZES) + 1), 0.0
    for sizes, count in stats.batch_sizes.items():
        least, _, most = sizes.partition("-")
        counts[bisect_left(SIZES, int(most or least))] += count
        total += count * (int(least) + int(most or least)) / 2
    below = list(accumulate(counts))
    return *below, total, below[-1]


def _states(stats: Stats) -> Sequence[float]:
    return [int(stats.state == state) for state in STATES]


UP = gauge(
    "gpuworker_up", "1 while the worker takes requests, or will as soon as its next owner has loaded; 0: dead, failed, stopped or not there.", is_up
)

FAMILIES: tuple[Family, ...] = (
    Family("gpuworker_info", GAUGE, "Always 1; what is served.", ("handler",), (Row("", ',handler="%s"'),), lambda s: (escaped(s.handler), 1)),
    each("gpuworker_state", GAUGE, "1 for what the worker last said of itself; see gpuworker_up.", "state", STATES, _states),
    gauge("gpuworker_owner_up", "1 while the owner process lives.", lambda s: int(s.owner_alive)),
    gauge("gpuworker_paused", "1 while no batch begins, until somebody resumes.", lambda s: int(s.paused)),
    gauge("gpuworker_owner_uptime_seconds", "Since the present owner took over.", lambda s: s.uptime_s),
    gauge("gpuworker_heartbeat_age_seconds", "Since the owner last gave a sign of life; it does ten times a second.", lambda s: s.heartbeat_age_s),
    gauge("gpuworker_batch_running_seconds", "How long the present batch has been running; 0 between batches.", lambda s: s.batch_running_s),
    counter("gpuworker_owner_restarts_total", "Owners started because the one before had died.", lambda s: s.restarts),
    counter("gpuworker_owner_reloads_total", "Owners replaced on request.", lambda s: s.reloads),
    counter("gpuworker_owner_reloads_failed_total", "Reloads whose new owner could not be loaded.", lambda s: s.failed_reloads),
    gauge("gpuworker_slots", "Slots: requests that can be on their way at a time.", lambda s: s.capacity),
    gauge("gpuworker_slots_in_use", "Slots that hold a request or an answer not yet read.", lambda s: s.slots_in_use),
    gauge("gpuworker_clients", "Frontend processes that have joined.", lambda s: len(s.clients)),
    counter("gpuworker_requests_submitted_total", "Requests sent to the owner.", lambda s: s.submitted),
    counter("gpuworker_requests_completed_total", "Requests answered with a result.", lambda s: s.completed),
    counter("gpuworker_requests_failed_total", "Requests answered with an error.", lambda s: s.failed),
    counter("gpuworker_requests_cancelled_total", "Requests withdrawn by their callers, queued or running.", lambda s: s.cancelled),
    counter("gpuworker_requests_expired_total", "Requests whose deadline passed before their answer.", lambda s: s.expired),
    counter("gpuworker_requests_abandoned_total", "Requests that ran on although their callers had gone, or had read enough.", lambda s: s.abandoned + s.satisfied),
    counter("gpuworker_requests_requeued_total", "Requests run again because an owner died.", lambda s: s.requeued),
    each(
        "gpuworker_requests_rejected_total", COUNTER,
        "Requests turned away: full (no free slot), forecast (not sent, would have been late), late (given up by the owner).", "reason",
        ("full", "forecast", "late"), lambda s: (s.rejected, s.rejected_forecast, s.rejected_late),
    ),
    counter("gpuworker_requests_fallback_total", "Requests answered by their client's fallback.", lambda s: s.fallbacks),
    counter("gpuworker_requests_on_time_total", "Answers within their latency budget.", lambda s: s.on_time),
    counter("gpuworker_requests_late_total", "Answers after their latency budget.", lambda s: s.late),
    times("gpuworker_claim_wait_seconds", "Of requests that had to wait for a free slot, how long.", WAKES, lambda s: s.claim_wait),
    times("gpuworker_queue_wait_seconds", "From a request's being sent until its owner saw it.", WAKES, lambda s: s.queue_wait),
    times("gpuworker_batch_wait_seconds", "From then until its batch left.", RUNS, lambda s: s.batch_wait),
    times("gpuworker_run_seconds", "How long batches ran.", RUNS, lambda s: s.run),
    times("gpuworker_wake_seconds", "From the answer until its caller ran again.", WAKES, lambda s: s.wake),
    histogram("gpuworker_batch_size", "Requests in a batch; from 64 on each counts as the middle of its octave in the sum.", map(str, SIZES), _sizes),
    each("gpuworker_batches_total", COUNTER, "Batches run, by why they left.", "reason", REASONS, lambda s: list(s.dispatch_reasons.values())),
    counter("gpuworker_batches_predicted_total", "Batches whose run time was predicted.", lambda s: s.predicted_batches),
    counter("gpuworker_batch_overruns_total", "Of these, batches that ran longer than predicted.", lambda s: s.overruns),
    counter("gpuworker_run_predicted_seconds_total", "Run time predicted for these, margins included.", lambda s: s.predicted_ns / 1e9),
    counter("gpuworker_run_observed_seconds_total", "Run time that these took.", lambda s: s.observed_ns / 1e9),
    counter("gpuworker_tokens_total", "Lengths of requests that ran.", lambda s: s.tokens),
    counter("gpuworker_padded_tokens_total", "The same as padded in their batches.", lambda s: s.padded_tokens),
    counter("gpuworker_owner_spins_total", "Waits of the owner that ended while it spun.", lambda s: s.owner_spins),
    counter("gpuworker_owner_parks_total", "Waits of the owner in which it slept.", lambda s: s.owner_parks),
    counter("gpuworker_owner_late_wakes_total", "Sleeps of the owner whose wake-up was lost; it found the requests by itself.", lambda s: s.late_wakes),
    counter("gpuworker_clients_reaped_total", "Clients whose process died or left, and was tidied up after.", lambda s: s.reaped_clients),
    counter("gpuworker_slots_reaped_total", "Slots taken back from such clients.", lambda s: s.reaped_slots),
    *DEVICE,
    *GENERATION,
)  # fmt: skip
