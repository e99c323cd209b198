"""When blocks are short: in which order, who is preempted, who is let in, who may pass whom. The model is a fake; see paged_model.py."""

import random

import pytest

from gpuworker.generation.sequence import Sequence
from tests.paged_model import World

# Order, blocks, preemption.


def test_the_higher_priority_goes_first_then_the_earlier():
    world = World(max_running=1)
    late_high = world.add(5, priority=1, arrival_ns=9)
    low = world.add(5, priority=0, arrival_ns=1)
    early_high = world.add(5, priority=1, arrival_ns=5)
    assert world.finish() == [early_high, late_high, low]


def test_the_youngest_of_the_lowest_priority_is_preempted():
    world = World(blocks=9, max_overtakes=0)
    old = world.add(30, 60)
    young_high = world.add(30, 60, priority=1)
    younger = world.add(20, 60)
    world.step()
    assert world.scheduler.running == [young_high, old, younger]
    while not world.preemptions:
        world.step()
    assert world.scheduler.running == [young_high, old]
    assert list(world.scheduler.waiting) == [younger]
    assert (younger.blocks, younger.computed) == ([], 0)
    assert younger.generated  # it keeps what it has said
    world.finish()


def test_outputs_are_the_same_with_a_tiny_cache_and_a_large_one():
    """A preempted sequence is computed again from all its tokens."""
    outputs = []
    for blocks in (13, 300):
        world = World(blocks, prefix_caching=False)
        sequences = [world.add(random.Random(i).choices(range(7), k=20 + i), 60) for i in range(10)]
        world.finish()
        outputs.append([sequence.generated for sequence in sequences])
        assert (world.preemptions > 3) == (blocks == 13)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_twenty_long_requests_in_a_tiny_cache_go_through(prefix_caching):
    world = World(blocks=21, prefix_caching=prefix_caching)
    sequences = [world.add(random.Random(i).choices(range(7), k=60), 200) for i in range(20)]
    finished = world.finish()
    assert finished[0] is sequences[0]
    assert 0 < world.preemptions <= 2 * len(sequences)
    useful = sum(len(sequence.tokens) - 1 for sequence in sequences)
    assert world.scheduler.stats().batch_tokens < 2 * useful


def test_a_step_that_preempts_lets_nobody_in():
    """Not even one that would come first and fit."""
    worlds = [World(blocks=9, watermark_blocks=0) for _ in range(2)]
    for world in worlds:
        world.add(60, 60)
        world.add(40, 60)
    steps = 0
    while not worlds[0].preemptions:
        worlds[0].step()
        steps += 1
    world = worlds[1]
    world.step(steps - 1)
    important = world.add(1, 5, priority=1)
    world.step()
    assert (world.preemptions, important.is_running) == (1, False)
    world.step()
    assert (world.preemptions, important.is_running) == (1, True)
    world.finish()


def test_the_tokens_of_a_preempted_sequence_go_to_others():
    world = World(blocks=5, max_batch_tokens=18, prefix_caching=False)
    older, middle, decoding = (Sequence(ticket, [1] * known, max_tokens=9) for ticket, known in ((1, 33), (2, 20), (3, 17)))
    for sequence, computed, blocks in ((older, 16, 1), (middle, 8, 1), (decoding, 16, 2)):
        sequence.computed, sequence.blocks = computed, world.pool.take(blocks)
        world.scheduler.running.append(sequence)
    chunks = world.scheduler.plan()
    assert [(chunk.sequence, chunk.count) for chunk in chunks] == [(middle, 1), (older, 17)]
    assert list(world.scheduler.waiting) == [decoding]
    world.scheduler.check()


@pytest.mark.parametrize(("length", "comes_in"), [(16 * 5, True), (16 * 5 + 1, False)])
def test_who_waits_needs_blocks_for_all_that_is_known_and_some_to_spare(length, comes_in):
    world = World(blocks=13, watermark_blocks=2, max_overtakes=0)
    world.add(64, 4)  # soon 5 of the 12 blocks
    head = world.add(length, 4)
    world.step(2)
    assert head.is_running == comes_in
    world.finish()  # when nothing else runs, nothing is spared


def test_blocks_that_half_a_prompt_still_needs_are_spoken_for():
    world = World(blocks=17, max_batch_tokens=32, max_overtakes=0)
    world.add(200, 4)  # 13 of 16 blocks, but 2 of them in the first step
    other = world.add(64, 4)
    world.step(3)
    assert world.pool.free >= 8
    assert not other.is_running
    world.finish()
    assert world.preemptions == 0


# Who may pass whom (waiting.py).


def hungry_world(max_overtakes):
    """6 of 10 blocks are used by one that goes on for a while; the head of the queue needs 8."""
    world = World(blocks=11, max_overtakes=max_overtakes, prefix_caching=False, max_batch_tokens=128)
    runs = world.add(80, 16)
    world.step()
    head = world.add(120, 5)
    return world, runs, head


def test_a_small_request_passes_a_head_that_does_not_fit():
    world, runs, head = hungry_world(max_overtakes=3)
    small = world.add(5, 2)
    world.step(2)
    assert small.is_finished
    assert not head.is_running
    assert not runs.is_finished
    world.finish()


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_nobody_passes_a_head_more_often_than_allowed_and_its_wait_ends(max_overtakes):
    world, runs, head = hungry_world(max_overtakes)
    passed = 0
    while not head.is_running:
        small = world.add(5, 1)  # there is always another one that would fit
        world.step()
        passed += small.is_finished and not head.is_running
    assert passed == max_overtakes
    assert runs.is_finished  # it did not wait longer than for what ran when it became the head
    world.finish()


def test_the_wait_of_a_small_one_behind_a_head_that_may_not_be_passed_ends_too():
    world, runs, head = hungry_world(max_overtakes=0)
    smalls = [world.add(5, 2) for _ in range(3)]
    while not runs.is_finished:
        assert not any(small.is_running for small in smalls)
        world.step()
    world.step(2)
    assert head.is_running
    assert smalls[0].is_finished
    world.finish()


def test_all_that_are_passed_count_it():
    world, _, head = hungry_world(max_overtakes=2)
    second = world.add(119, 5)
    for _ in range(5):
        world.add(5, 1)
    world.step()
    assert (head.overtaken, second.overtaken) == (2, 2)
    world.finish()


def test_nobody_passes_a_preempted_sequence():
    world = World(blocks=9, prefix_caching=False)
    world.add(60, 60)
    preempted = world.add(40, 60)
    while not world.preemptions:
        world.step()
    small = world.add(1, 1)
    while not preempted.is_running:
        assert not small.is_running
        world.step()
    world.finish()


def test_without_memory_trouble_it_is_first_come_first_served():
    world = World(max_running=2)
    sequences = [world.add(5, 3) for _ in range(9)]
    assert world.finish() == sequences
