"""When an owner is started again: pure policy."""

from gpuworker.worker.restarts import LONGEST_PAUSE_S, Restarts


def test_an_owner_that_has_answered_something_is_replaced_at_once_however_often():
    restarts = Restarts(max_restarts=0)
    assert [restarts.pause_s(has_answered=True) for _ in range(100)] == [0.0] * 100


def test_owners_that_answer_nothing_come_back_slower_and_slower_and_then_not_at_all():
    restarts = Restarts(max_restarts=5)
    assert [restarts.pause_s(has_answered=False) for _ in range(6)] == [0.0, 0.25, 0.5, 1.0, 2.0, None]
    assert restarts.fruitless == 6


def test_an_answer_makes_up_for_all_deaths_before():
    restarts = Restarts(max_restarts=2)
    for _ in range(10):
        assert [restarts.pause_s(False), restarts.pause_s(False), restarts.pause_s(True)] == [0.0, 0.25, 0.0]


def test_none_at_all_may_fail():
    assert Restarts(max_restarts=0).pause_s(has_answered=False) is None


def test_without_a_limit_pauses_grow_to_a_bound():
    restarts = Restarts(max_restarts=None)
    pauses = [restarts.pause_s(False) for _ in range(5000)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
