"""Buffers of received arrays are used again only when nobody can tell."""

import gc
import sys
import threading

import numpy as np

from gpuworker.client.landing import KEPT, Landing, Landings
from gpuworker.payload import encode, parse_layout


def layout_of(array):
    meta = encode(array)[1]
    return parse_layout(meta, 1 << 30)


def land(landings, layout, value):
    landing = landings.expected()
    if landing is None or landing.response != layout.data_bytes:
        landing = Landing(layout.meta, layout.data_bytes, layout)
    landing.array[...] = value
    array = landing.array[...]
    landings.keep(landing)
    return array


def address(array):
    return array.__array_interface__["data"][0]


def test_a_dropped_result_makes_room_for_the_next():
    landings, layout = Landings(), layout_of(np.zeros(16, "f4"))
    first = land(landings, layout, 1)
    where = address(first)
    del first
    assert address(land(landings, layout, 2)) == where


def test_whatever_is_made_from_a_result_keeps_its_memory():
    landings, layout = Landings(), layout_of(np.zeros((4, 4), "f4"))
    makers = [
        lambda a: a,
        lambda a: a[1:],
        lambda a: a.T,
        lambda a: memoryview(a),
        lambda a: a.view("u1"),
        lambda a: a.reshape(2, 8),
        lambda a: a.flat,
        iter,
    ]
    for value, make in enumerate(makers):
        held = make(land(landings, layout, value))
        others = [land(landings, layout, 100 + i) for i in range(2 * KEPT)]
        for item in np.asarray(list(held)).ravel() if not isinstance(held, (np.ndarray, memoryview)) else np.asarray(held).view("f4").ravel():
            assert item == value
        del held, others
        gc.collect()


def test_results_held_together_are_all_different():
    landings, layout = Landings(), layout_of(np.zeros(16, "f4"))
    held = [land(landings, layout, i) for i in range(20)]
    assert len({address(array) for array in held}) == 20
    assert [array[0] for array in held] == list(range(20))
    assert all(address(array) % 64 == 0 and array.flags.writeable for array in held)


def test_another_layout_gets_memory_of_its_own():
    landings = Landings()
    small, large = layout_of(np.zeros(16, "f4")), layout_of(np.zeros(64, "f4"))
    assert land(landings, small, 1).shape == (16,)
    assert land(landings, large, 2).shape == (64,)
    assert land(landings, small, 3).shape == (16,)


def test_threads_never_share_a_landing():
    landings, layout = Landings(), layout_of(np.zeros(256, "i4"))
    wrong = []

    def use(number):
        held = []
        for i in range(3000):
            array = land(landings, layout, number * 10_000 + i)
            held.append((number * 10_000 + i, array))
            wrong.extend((value, array) for value, array in held if not (array == value).all())
            del held[: max(len(held) - 2, 0)], array

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
