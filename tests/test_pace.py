"""When the next batch may begin beside one that runs."""

from gpuworker.scheduling.pace import Pace

MS = 1_000_000


def ran(pace, key, began_ns, ended_ns, prepare_ns=0):
    pace.began(key, began_ns, began_ns + prepare_ns)
    pace.ended(ended_ns)


def test_nothing_runs_so_it_is_time():
    assert Pace().opens_ns() <= 0


def test_beside_a_batch_whose_run_time_is_unknown_only_a_full_one_begins():
    pace = Pace()
    pace.began("a", 0, 0)
    assert pace.opens_ns() > 10**18
    assert pace.free_ns() == 0
    pace.ended(MS)
    assert pace.opens_ns() <= 0


def test_the_next_batch_opens_as_long_before_the_end_as_preparing_takes():
    pace = Pace()
    ran(pace, "a", 0, 10 * MS, prepare_ns=2 * MS)
    pace.began("a", 20 * MS, 22 * MS)
    assert pace.free_ns() == 30 * MS
    assert pace.opens_ns() == 28 * MS


def test_a_batch_that_began_beside_another_has_the_device_from_its_end_on():
    pace = Pace()
    ran(pace, "a", 0, 10 * MS)
    ran(pace, "b", 20 * MS, 25 * MS)
    pace.began("a", 100 * MS, 100 * MS)
    pace.began("b", 109 * MS, 109 * MS)
    assert pace.free_ns() == 115 * MS
    pace.ended(112 * MS)  # a took 2 ms more
    assert pace.since_ns == 112 * MS
    assert pace.free_ns() == 117 * MS
    pace.ended(117 * MS)
    pace.began("b", 200 * MS, 200 * MS)
    assert pace.free_ns() == 205 * MS  # the time that b had the device for, not the time since it began


def test_run_times_follow_slowly():
    pace = Pace()
    ran(pace, "a", 0, 8 * MS)
    ran(pace, "a", 10 * MS, 10 * MS + 16 * MS)
    pace.began("a", 100 * MS, 100 * MS)
    assert pace.free_ns() == 110 * MS


def test_keys_without_end_do_not_fill_the_memory():
    pace = Pace()
    for key in range(10_000):
        ran(pace, key, key * MS, key * MS + 1)
    assert len(pace._run_ns) <= 4096
