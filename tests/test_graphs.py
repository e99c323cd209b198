"""Which shapes get a graph, and which are dropped."""

from gpuworker.execution.graphs import RUNS_PER_CAPTURE, GraphCache
from gpuworker.execution.grid import Shape

A, B, C, D = (Shape(rows) for rows in (1, 2, 4, 8))


class Releases(dict):
    """name of a graph -> bytes that its end gives back; keeps the order of ends."""

    def __init__(self, **sizes):
        super().__init__(sizes)
        self.order = []

    def __call__(self, graph):
        self.order.append(graph)
        return self.get(graph, 0)


def cache_of(shapes=(A, B, C, D), limit_bytes=100, **sizes):
    releases = Releases(**sizes)
    return GraphCache(shapes, limit_bytes, releases), releases


# What is captured next.


def test_the_background_takes_the_largest_first_and_each_once():
    cache, _ = cache_of([B, D, A, D, C])
    order = []
    while (shape := cache.next()) is not None:
        order.append(shape)
        assert cache.add(shape, str(shape), 1, 1, may_drop=False)
    assert order == [D, C, B, A]
    assert (len(cache), cache.bytes) == (4, 4)


def test_the_background_drops_nothing_and_goes_on_with_what_fits():
    cache, releases = cache_of(limit_bytes=10, d=8, c=5)
    assert cache.add(cache.next(), "d", 8, 1, may_drop=False)
    assert cache.next() == C
    assert not cache.add(C, "c", 5, 1, may_drop=False)
    assert releases.order == ["c"]
    assert cache.bytes == 8
    assert cache.next() == B
    assert cache.add(B, "b", 2, 1, may_drop=False)
    assert cache.next() is None  # full
    assert not cache.failed


def test_what_has_failed_or_was_left_out_is_not_tried_in_the_background():
    cache, _ = cache_of()
    cache.fail(D, "sync")
    cache.leave_out(C)
    assert cache.next() == B
    assert cache.failed == {D: "sync"}


def test_a_shape_that_is_run_eagerly_is_due_when_a_graph_would_have_paid():
    cache, _ = cache_of([])
    cache.add(A, "a", 1, 1000, may_drop=True)
    cache.replayed(10)
    for run_number in range(1, 12):
        assert not cache.is_due(B), run_number
        cache.ran(B, 110)  # of which a graph would have saved 100
        if run_number == 10:
            break
    assert cache.is_due(B)
    assert not cache.is_due(C)


def test_before_any_capture_a_few_runs_are_taken_for_its_cost():
    cache, _ = cache_of([])
    for _ in range(RUNS_PER_CAPTURE):
        assert not cache.is_due(A)
        cache.ran(A, 50)
    assert cache.is_due(A)


def test_no_sequence_of_runs_costs_more_than_twice_the_best_in_hindsight():
    for runs in range(1, 60):
        cache, _ = cache_of([])
        cache.add(D, "d", 1, 1000, may_drop=True)
        spent = 0
        for _ in range(runs):
            if cache.get(A) is None and cache.is_due(A):
                spent += 1000
                cache.add(A, "a", 1, 1000, may_drop=True)
            if cache.get(A) is None:
                spent += 100
                cache.ran(A, 100)
        assert spent <= 2 * min(runs * 100, 1000)


def test_nothing_is_due_where_a_graph_saves_nothing():
    cache, _ = cache_of([])
    cache.add(D, "d", 1, 1000, may_drop=True)
    cache.replayed(100)
    for _ in range(1000):
        cache.ran(A, 90)
    assert not cache.is_due(A)


def test_what_has_failed_is_never_due_again():
    cache, _ = cache_of([])
    for _ in range(100):
        cache.ran(A, 50)
    cache.fail(A, "sync")
    assert not cache.is_due(A)
    cache.ran(A, 5000)
    assert not cache.is_due(A)


def test_what_the_background_left_out_a_load_may_ask_for():
    cache, _ = cache_of()
    cache.leave_out(A)
    for _ in range(RUNS_PER_CAPTURE):
        cache.ran(A, 50)
    assert cache.is_due(A)


# What is dropped.


def test_the_least_recently_used_makes_room():
    cache, releases = cache_of(limit_bytes=10, a=4, b=4, c=4)
    for shape, graph in ((A, "a"), (B, "b")):
        assert cache.add(shape, graph, 4, 1, may_drop=True)
    assert cache.get(A) == "a"
    assert cache.add(C, "c", 4, 1, may_drop=True)
    assert releases.order == ["b"]
    assert cache.get(B) is None
    assert (cache.get(A), cache.get(C)) == ("a", "c")
    assert cache.bytes == 8


def test_memory_that_a_dropped_graph_shares_is_not_counted_as_free():
    cache, releases = cache_of(limit_bytes=10, a=0, b=1)
    cache.add(A, "a", 5, 1, may_drop=True)
    cache.add(B, "b", 5, 1, may_drop=True)
    assert cache.add(C, "c", 1, 1, may_drop=True)
    assert releases.order == ["a", "b"]


def test_a_graph_above_the_limit_by_itself_fails():
    cache, releases = cache_of(limit_bytes=10, a=4, d=20)
    cache.add(A, "a", 4, 1, may_drop=True)
    assert not cache.add(D, "d", 20, 1, may_drop=True)
    assert releases.order == ["a", "d"]
    assert "above the limit of 10 bytes" in cache.failed[D]
    assert cache.bytes == 0
    assert not cache.is_due(D)


def test_giving_up_drops_everything_for_good_and_keeps_the_first_reason():
    cache, releases = cache_of(a=1, b=1)
    cache.add(A, "a", 1, 1, may_drop=True)
    cache.add(B, "b", 1, 1, may_drop=True)
    cache.give_up("first")
    cache.give_up("second")
    assert releases.order == ["a", "b"]
    assert (cache.reason, len(cache), cache.bytes, cache.next(), cache.get(A)) == ("first", 0, 0, None, None)
    for _ in range(100):
        cache.ran(A, 50)
    assert not cache.is_due(A)


def test_hits_and_misses_are_counted():
    cache, _ = cache_of([])
    cache.add(A, "a", 1, 1, may_drop=True)
    cache.get(A)
    cache.get(B)
    cache.ran(B, 1)
    assert (cache.hits, cache.misses) == (1, 1)
