"""The pool of KV blocks: every block is either free or held, and the order in which they come back."""

import pytest

from gpuworker.generation.blocks import TRASH_BLOCK, BlockPool


@pytest.fixture
def pool():
    pool = BlockPool(9)
    yield pool
    pool.check()


def test_the_trash_block_is_never_handed_out(pool):
    assert TRASH_BLOCK == 0
    assert pool.usable == pool.free == 8
    assert sorted(pool.take(8)) == list(range(1, 9))
    assert (pool.free, pool.used) == (0, 8)


@pytest.mark.parametrize(("blocks", "block_tokens"), [(1, 16), (0, 16), (-3, 16), (8, 0)])
def test_a_pool_that_could_hold_nothing_is_refused(blocks, block_tokens):
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(blocks, block_tokens)


def test_taking_more_than_are_free_takes_nothing(pool):
    pool.take(5)
    with pytest.raises(RuntimeError, match="4 blocks were asked for and 3 are free"):
        pool.take(4)
    assert pool.free == 3
    assert pool.take(0) == []


def test_the_block_released_last_is_taken_first(pool):
    a, b, c = pool.take(3)
    pool.take(5)
    pool.release([a, b])
    pool.release([c])
    assert pool.take(3) == [c, a, b]  # within one sequence the last block is released first


def test_a_second_release_raises(pool):
    blocks = pool.take(2)
    pool.release(blocks)
    for again in ([blocks[0]], [TRASH_BLOCK], [-1], [8]):
        with pytest.raises(RuntimeError, match="nobody holds it"):
            pool.release(again)


def test_a_shared_block_is_free_when_the_last_holder_has_released_it(pool):
    (block,) = pool.take(1)
    pool.share([block])
    assert (pool.holders(block), pool.used) == (2, 1)
    pool.release([block])
    assert (pool.holders(block), pool.used) == (1, 1)
    pool.release([block])
    assert (pool.holders(block), pool.used) == (0, 0)


def test_only_what_is_held_or_named_can_be_shared(pool):
    with pytest.raises(RuntimeError, match="nothing that could be shared"):
        pool.share([3])


def test_a_named_block_keeps_its_contents_until_it_is_taken_and_is_taken_last(pool):
    named = pool.take(2)
    for block in named:
        pool.name(block, b"%d" % block)
    pool.release(named)
    assert (pool.free, pool.cached) == (8, 2)
    rest = pool.take(6)
    assert not set(rest) & set(named)
    assert [pool.find(b"%d" % block) for block in named] == named
    assert pool.take(1) == [named[1]]  # the tail went first, so the beginning survives longest
    assert pool.find(b"%d" % named[1]) is None
    assert pool.find(b"%d" % named[0]) == named[0]
    pool.share([named[0]])
    assert (pool.free, pool.cached, pool.holders(named[0])) == (0, 0, 1)


def test_the_least_recently_used_goes_first(pool):
    a, b = pool.take(2)
    pool.name(a, b"a")
    pool.name(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.share([a])
    pool.release([a])
    pool.take(6)
    assert pool.take(2) == [b, a]


def test_of_two_blocks_with_the_same_contents_one_has_the_name(pool):
    a, b = pool.take(2)
    pool.name(a, b"x")
    pool.name(a, b"x")
    pool.name(b, b"x")
    assert pool.find(b"x") == a
    pool.release([b])
    assert pool.cached == 0
    with pytest.raises(RuntimeError, match="another name"):
        pool.name(a, b"y")
    with pytest.raises(RuntimeError, match="is free"):
        pool.name(b, b"y")


def test_what_is_forgotten_is_found_no_more(pool):
    a, b = pool.take(2)
    pool.name(a, b"a")
    pool.name(b, b"b")
    pool.forget(a)
    assert pool.find(b"a") is None
    assert pool.holders(a) == 1
    pool.release([a, b])
    pool.forget(b)
    pool.forget(b)
    assert (pool.free, pool.cached) == (8, 0)
    pool.check()


def test_so_many_blocks_for_so_many_tokens(pool):
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17, 128)] == [0, 1, 1, 2, 8]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda pool: pool._unnamed.append(pool._unnamed[0]), "free twice"),
        (lambda pool: pool._unnamed.append(TRASH_BLOCK), "none of ours"),
        (lambda pool: pool._unnamed.pop(), "neither"),
        (lambda pool: pool._holders.__setitem__(pool._unnamed[0], 1), "both free and held"),
        (lambda pool: pool._holders.__setitem__(TRASH_BLOCK, 1), "both free and held"),
        (lambda pool: pool._block_of.clear(), "do not agree"),
        (lambda pool: pool._name_of.__setitem__(pool._unnamed[0], b"x") or pool._block_of.__setitem__(b"x", pool._unnamed[0]), "before its time"),
    ],
)
def test_the_check_finds_what_is_wrong(damage, says):
    pool = BlockPool(9)
    (block,) = pool.take(1)
    pool.name(block, b"name")
    pool.check()
    damage(pool)
    with pytest.raises(RuntimeError, match=says):
        pool.check()
