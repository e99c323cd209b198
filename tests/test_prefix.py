"""Prefix caching: what is found, what is not, what is kept, and that it changes no output."""

import pytest

from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.prefix import PrefixCache
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence
from tests.paged_model import PagedModel, alone, step


def scheduler_of(blocks=65, **options):
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, **{"max_batch_tokens": 64, "max_running": 8, "max_model_tokens": 1000, **options})
    return scheduler, PagedModel(pool)


def finish(scheduler, model, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        step(scheduler, model)
    for sequence in sequences:
        assert (sequence.generated, sequence.finish_reason) == alone(sequence.prompt, sequence.max_tokens)
    assert scheduler.pool.used == 0


def computed_by(scheduler, model, sequence):
    before = scheduler.stats().batch_tokens
    finish(scheduler, model, sequence)
    return scheduler.stats().batch_tokens - before


@pytest.mark.parametrize(("length", "found"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (160, 144)])
def test_a_full_hit_leaves_at_least_one_token_to_compute(length, found):
    scheduler, model = scheduler_of()
    prompt = [i % 7 for i in range(length)]
    assert computed_by(scheduler, model, Sequence(1, prompt, max_tokens=1)) == length
    assert computed_by(scheduler, model, Sequence(2, prompt, max_tokens=1)) == length - found >= 1
    assert scheduler.stats().prefix_hit_tokens == found


def test_the_answer_is_part_of_what_is_found_next_time():
    scheduler, model = scheduler_of()
    first = Sequence(1, range(20), max_tokens=30)
    finish(scheduler, model, first)
    assert computed_by(scheduler, model, Sequence(2, [*first.tokens, 3, 4], max_tokens=1)) == 52 - 48


def test_only_what_is_the_same_from_the_very_beginning_is_found():
    scheduler, model = scheduler_of()
    finish(scheduler, model, Sequence(1, [1] * 64, max_tokens=1))
    assert computed_by(scheduler, model, Sequence(2, [2] + [1] * 63, max_tokens=1)) == 64
    assert computed_by(scheduler, model, Sequence(3, [1] * 16 + [3] + [1] * 47, max_tokens=1)) == 48


def test_blocks_of_those_that_run_are_shared():
    scheduler, model = scheduler_of(max_batch_tokens=100)
    prompt = [5] * 90
    scheduler.add(Sequence(1, prompt, max_tokens=4))
    step(scheduler, model)
    assert scheduler.stats().blocks_used == 6
    for ticket in (2, 3, 4):
        scheduler.add(Sequence(ticket, prompt, max_tokens=4))
    step(scheduler, model)
    assert scheduler.stats().blocks_used == 6 + 3
    assert [scheduler.pool.holders(block) for block in scheduler.running[0].blocks] == [4] * 5 + [1]
    while scheduler.running:
        step(scheduler, model)
    assert (scheduler.pool.used, scheduler.pool.cached) == (0, 5)


def test_shared_blocks_count_once_against_what_is_free():
    """The second fits only because it brings next to nothing of its own."""
    scheduler, model = scheduler_of(blocks=9)
    prompt = [5] * 90  # 6 of the 8 blocks
    scheduler.add(Sequence(1, prompt, max_tokens=4))
    for _ in range(3):
        step(scheduler, model)
    scheduler.add(Sequence(2, prompt, max_tokens=4))
    step(scheduler, model)
    assert len(scheduler.running) == 2
    assert scheduler.stats().preemptions == 0


def test_of_a_cached_prefix_the_beginning_survives_longest():
    scheduler, model = scheduler_of(blocks=9)
    finish(scheduler, model, Sequence(1, [1] * 97, max_tokens=1))  # 6 named blocks, 2 others
    finish(scheduler, model, Sequence(2, [2] * 60, max_tokens=1))  # takes those 2, and the last 2 of the 6
    assert len(PrefixCache(scheduler.pool).find(Sequence(3, [1] * 97, max_tokens=1))) == 4


def test_caches_with_different_keys_find_nothing_of_each_other():
    pool = BlockPool(9)
    sequence = Sequence(1, range(40), max_tokens=1)
    sequence.blocks = pool.take(3)
    PrefixCache(pool, b"model A").keep(sequence, 0, 40)
    assert PrefixCache(pool, b"model A").find(Sequence(2, range(40), max_tokens=1)) == sequence.blocks[:2]
    assert PrefixCache(pool, b"model B").find(Sequence(2, range(40), max_tokens=1)) == []


def test_what_two_have_computed_side_by_side_is_kept_once():
    scheduler, model = scheduler_of()
    finish(scheduler, model, Sequence(1, [1] * 20, max_tokens=1), Sequence(2, [1] * 20, max_tokens=1))
    assert scheduler.pool.cached == 1


def test_what_a_failed_sequence_has_computed_is_not_used_for_others():
    scheduler, model = scheduler_of()
    failed = Sequence(1, [1] * 40, max_tokens=9)
    scheduler.add(failed)
    step(scheduler, model)
    assert scheduler.fail(failed, "not a number")
    assert (scheduler.pool.used, scheduler.pool.cached) == (0, 0)
    assert computed_by(scheduler, model, Sequence(2, [1] * 40, max_tokens=1)) == 40


def test_it_can_be_switched_off():
    scheduler, model = scheduler_of(prefix_caching=False)
    for ticket in (1, 2):
        assert computed_by(scheduler, model, Sequence(ticket, [1] * 40, max_tokens=1)) == 40
    assert (scheduler.stats().prefix_hit_tokens, scheduler.pool.cached) == (0, 0)


def test_a_preempted_sequence_finds_what_it_had_computed():
    scheduler, model = scheduler_of(blocks=9)
    finish(scheduler, model, Sequence(1, [3] * 50, max_tokens=60, arrival_ns=1), Sequence(2, [4] * 20, max_tokens=80, arrival_ns=2))
    assert scheduler.stats().preemptions == 1
    assert scheduler.stats().prefix_hit_tokens >= 16
