"""When requests arrive: processes with a seed. All give ascending times in ns, beginning near 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ArrivalTimes = NDArray[np.int64]


def poisson(rate_per_s: float, count: int, seed: int = 0) -> ArrivalTimes:
    """Independent of one another: exponential gaps."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return _ns(np.cumsum(gaps_s))


def uniform(rate_per_s: float, count: int) -> ArrivalTimes:
    """Equal gaps."""
    return _ns(np.arange(count) / rate_per_s)


def mmpp(rate_per_s: float, count: int, seed: int = 0, *, burst: float = 4.0, burst_share: float = 0.1, cycle_ms: float = 400.0) -> ArrivalTimes:
    """Poisson arrivals whose rate jumps between two levels (a Markov-modulated Poisson process) with a mean of rate_per_s.

    For `burst_share` of the time, in stretches of exponential length, it is `burst` times the mean, else correspondingly lower; quiet and burst
    together last cycle_ms on average.

    Raises ValueError when burst * burst_share > 1: then the bursts alone exceed the mean.
    """
    if burst * burst_share > 1 or not 0 < burst_share < 1:
        raise ValueError(f"burst={burst:g}, burst_share={burst_share:g}: bursts alone would exceed the mean rate")
    random = np.random.default_rng(seed)
    quiet_per_s = rate_per_s * (1 - burst * burst_share) / (1 - burst_share)
    start_s, total, bursting = 0.0, 0, False
    parts = [np.empty(0)]
    while total < count:
        length_s = random.exponential(cycle_ms / 1e3 * (burst_share if bursting else 1 - burst_share))
        arrivals = random.poisson((rate_per_s * burst if bursting else quiet_per_s) * length_s)
        parts.append(np.sort(random.uniform(start_s, start_s + length_s, arrivals)))
        start_s, total, bursting = start_s + length_s, total + arrivals, not bursting
    return _ns(np.concatenate(parts)[:count])


def _ns(times_s: NDArray[np.float64]) -> ArrivalTimes:
    return np.rint(times_s * 1e9).astype(np.int64)
