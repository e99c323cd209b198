"""Steps that sizes and lengths are rounded up to."""

from gpuworker.scheduling.sizes import at_least, doubling


def test_sizes_double_up_to_the_most():
    assert [doubling(most) for most in (1, 2, 3, 4, 5, 20)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8, 16, 20]]
    assert doubling(4096) == [1 << power for power in range(13)]


def test_a_value_is_rounded_up_to_a_step_or_stays():
    assert [at_least(value, (4, 8)) for value in (0, 1, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 9]
    assert at_least(3, ()) == 3
