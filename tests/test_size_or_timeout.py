"""The size/timeout rule, exact to the nanosecond on a fake clock."""

import pytest

from gpuworker.scheduling import Queued, Reason, Run, SizeOrTimeout, Wait
from gpuworker.testing import FakeClock, simulate

MS = 1_000_000


def queue(*enqueue_ns):
    return [Queued(i, at, 0) for i, at in enumerate(enqueue_ns)]


def test_an_empty_queue_waits_for_an_arrival():
    assert SizeOrTimeout(8, 5).decide([], 123) == Wait(None)


def test_a_lone_request_leaves_exactly_at_enqueue_plus_max_wait():
    policy = SizeOrTimeout(8, 5)
    assert policy.decide(queue(1000), 1000) == Wait(1000 + 5 * MS)
    assert policy.decide(queue(1000), 1000 + 5 * MS - 1) == Wait(1000 + 5 * MS)
    assert policy.decide(queue(1000), 1000 + 5 * MS) == Run(1, Reason.AGE)
    assert [b.start_ns for b in simulate(policy, [1000], lambda n, length: 1).batches] == [1000 + 5 * MS]


def test_a_hundred_in_a_row_leave_at_once_as_one_batch():
    batches = simulate(SizeOrTimeout(100, 1000), range(100), lambda n, length: MS).batches
    assert [(b.start_ns, len(b.requests), b.reason) for b in batches] == [(99, 100, Reason.FULL)]


def test_the_clock_is_the_oldest_requests_own_and_is_never_restarted():
    policy, clock = SizeOrTimeout(8, 5), FakeClock()
    waiting = queue(0)
    for at in range(MS, 5 * MS, MS):  # a newcomer every millisecond does not put the first one off
        clock.advance(at - clock())
        waiting.append(Queued(len(waiting), at, 0))
        assert policy.decide(waiting, clock()) == Wait(5 * MS)
    assert policy.decide(waiting, 5 * MS) == Run(5, Reason.AGE)


def test_what_waited_behind_a_running_batch_does_not_wait_again():
    # 50 ms runs, 40 ms wait: B comes while A runs (40..90) and is due at 90 = when the device is free again, so it is done 90 ms after it came.
    a, b = simulate(SizeOrTimeout(8, 40), [0, 50 * MS], lambda n, length: 50 * MS).batches
    assert (a.start_ns, a.end_ns) == (40 * MS, 90 * MS)
    assert b.start_ns == 90 * MS
    assert b.end_ns - 50 * MS == 90 * MS


def test_an_idle_device_takes_a_single_request_at_once_when_there_is_no_wait():
    (batch,) = simulate(SizeOrTimeout(8, 0), [7], lambda n, length: MS).batches
    assert (batch.start_ns, batch.requests, batch.reason) == (7, (0,), Reason.AGE)


def test_staggered_load_fills_every_batch():
    # 24 requests 5 ms apart, 100 ms runs, at most 8: the first leaves at its age of 40 ms with what is there, and then every batch is full.
    batches = simulate(SizeOrTimeout(8, 40), [i * 5 * MS for i in range(24)], lambda n, length: 100 * MS).batches
    assert [len(b.requests) for b in batches] == [8, 8, 8]
    assert [b.requests for b in batches] == [tuple(range(i, i + 8)) for i in (0, 8, 16)]


def test_arrivals_during_a_run_leave_together():
    first, second = simulate(SizeOrTimeout(8, 0), [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS], lambda n, length: 100 * MS).batches
    assert (first.requests, second.requests) == ((0,), (1, 2, 3, 4))


def test_a_hundred_queued_at_once_are_ten_tens():
    batches = simulate(SizeOrTimeout(10, 50), [0] * 100, lambda n, length: MS).batches
    assert [len(b.requests) for b in batches] == [10] * 10
    assert [r for b in batches for r in b.requests] == list(range(100))


@pytest.mark.parametrize("max_wait_ms", [0, 0.5, 3])
def test_nothing_is_lost_or_doubled(max_wait_ms):
    arrivals = sorted((i * 7919) % 50 * MS for i in range(200))
    batches = simulate(SizeOrTimeout(7, max_wait_ms), arrivals, lambda n, length: n * MS).batches
    assert sorted(r for b in batches for r in b.requests) == list(range(200))
    assert all(len(b.requests) <= 7 for b in batches)
