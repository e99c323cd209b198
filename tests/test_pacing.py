"""How much of a prompt is computed beside sequences that decode: on devices that are only costs, with noise. Nothing waits."""

from itertools import pairwise

import numpy as np
import pytest

from gpuworker.generation.costs import StepCost, Work
from gpuworker.generation.engine import SLOWDOWN
from gpuworker.generation.pacing import FIRST_TOKENS, LEAST_TOKENS, PrefillPace

MOST = 512
DEVICES_MS = {
    # of a step, a row, a row's key, a chunk, a chunk's key, its token, its pair
    "two cores": (30, 1.8, 0.011, 4, 0.007, 1.3, 0.00125),
    "no attention to speak of": (30, 1.8, 0, 0, 0, 1.3, 0),
    "expensive tokens": (30, 1.8, 0.002, 0, 0.001, 8, 0.001),
    "a GPU": (12, 0.02, 0.0004, 3, 0.0002, 0.15, 0.00001),
    "a GPU that hardly notices a prompt": (20, 0.01, 0.0001, 0, 0.00005, 0.01, 0.000005),
}


class Device:
    """Steps that take what they cost, times noise; the pace sees each of them. noise: of their logarithm."""

    def __init__(self, costs_ms, *, slowdown=SLOWDOWN, noise=0.0, rows=15, seed=0):
        self.pace, self.costs_ms, self.noise = PrefillPace(slowdown, MOST), np.array(costs_ms), noise
        self.random, self.rows, self.length = np.random.default_rng(seed), rows, 24
        self.lull, self.beside, self.chunks = [], [], []
        arriving = Work()
        for _ in range(rows):
            arriving = arriving.with_chunk(0, 24)
        self.step(arriving)

    @property
    def others(self):
        return Work(self.rows, self.rows * self.length)

    def exact_ms(self, work):
        return float(self.costs_ms @ (1.0, *work))

    def step(self, work):
        took_ms = self.exact_ms(work) * np.exp(self.random.normal(0, self.noise))
        self.pace.observe(int(took_ms * 1e6), work)
        self.length += 1
        return took_ms

    def decode(self, steps=100):
        for _ in range(steps):
            self.step(self.others)

    def prompt(self, tokens, start=0):
        """Computes one beside the others. -> how many times longer that takes than in chunks of the greatest length."""
        at, paced_ms = start, 0.0
        while at < tokens:
            count = min(tokens - at, self.pace.tokens(self.others, at))
            self.lull.append(self.exact_ms(self.others) * np.exp(self.random.normal(0, self.noise)))
            if not count:
                paced_ms += self.step(self.others)
                continue
            self.chunks.append(count)
            self.beside.append(self.step(self.others.with_chunk(at, count)))
            paced_ms, at = paced_ms + self.beside[-1], at + count
        ends = [*range(start, tokens, MOST - self.rows), tokens]
        return paced_ms / sum(self.exact_ms(self.others.with_chunk(a, b - a)) for a, b in pairwise(ends))

    def p99(self):
        return np.percentile(self.beside, 99) / np.percentile(self.lull, 99)


@pytest.mark.parametrize("rows", [1, 15, 63])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("name", DEVICES_MS)
def test_p99_between_tokens_is_at_most_twice_that_without_and_the_prompt_gets_on(name, noise, rows):
    device = Device(DEVICES_MS[name], noise=noise, rows=rows)
    device.decode()
    times = device.prompt(4000)
    assert device.p99() <= (2 if min(device.chunks[:-1]) > LEAST_TOKENS else 3.5)  # one that decodes alone: the shortest chunk takes longer than that
    assert times <= 8
    assert min(device.chunks[:-1]) >= LEAST_TOKENS


def test_prompt_after_prompt_each_as_long_as_it_likes():
    device = Device(DEVICES_MS["two cores"], noise=0.08)
    for tokens, start in ((4000, 0), (500, 0), (4000, 3000), (2000, 0), (4000, 0)):
        device.decode(30)
        device.prompt(tokens, start)
    assert device.p99() <= 2


def test_at_once_it_is_known_how_much_more_a_prompts_last_tokens_cost_than_its_first():
    device = Device(DEVICES_MS["two cores"])
    device.decode()
    device.prompt(4000)
    device.prompt(300)
    early, late = (device.pace.tokens(device.others, start) for start in (0, 3500))
    assert early > 2.5 * late


def test_as_answers_get_longer_prompts_get_more():
    """Steps without a prompt become slower meanwhile, and nothing else says so than steps with one."""
    device = Device(DEVICES_MS["no attention to speak of"], noise=0.05)
    device.costs_ms[2] = 0.02
    device.decode()
    device.prompt(8000)
    assert np.median(device.chunks[-40:]) > 1.2 * np.median(device.chunks[20:60])


def test_a_device_that_does_not_notice_a_prompt_computes_as_much_as_it_may():
    device = Device((20, 0.01, 0, 0, 0, 0.0001, 0), noise=0.02)
    device.decode()
    device.prompt(20_000)
    assert device.chunks[-2] == MOST


def test_it_never_stops():
    device = Device((1, 0.01, 0, 0, 0, 100, 0), noise=0.05)
    device.decode()
    device.prompt(300)
    assert set(device.chunks[-50:-1]) == {LEAST_TOKENS}


def test_it_follows_when_the_device_becomes_faster_for_prompts():
    device = Device((30, 1.8, 0, 0, 0, 8, 0), noise=0.05)
    device.decode()
    device.prompt(500)
    few = device.chunks[-2]
    device.costs_ms[5] = 0.5
    device.prompt(2000)
    assert device.chunks[-2] > 3 * few


def test_a_machine_that_becomes_slower_as_a_whole_changes_little():
    device = Device(DEVICES_MS["two cores"], noise=0.05)
    device.decode()
    device.prompt(500)
    before = np.median(device.chunks[-10:])
    device.costs_ms *= 3
    device.prompt(1000)
    assert before / 2 <= np.median(device.chunks[-10:]) <= before * 2


def test_a_single_slow_step_hardly_counts():
    device = Device(DEVICES_MS["two cores"], noise=0.05)
    device.decode()
    device.prompt(1000)
    device.decode(1)
    before = device.pace.tokens(device.others, 1000)
    work = device.others
    device.pace.observe(int(device.exact_ms(work) * 50e6), work)
    assert before / 2 <= device.pace.tokens(device.others, 1000) <= 3 * before


def test_when_many_more_decode_than_before_the_others_are_not_kept_out():
    device = Device(DEVICES_MS["two cores"], rows=1)
    device.decode(6)
    device.prompt(200)
    device.decode(1)
    assert device.pace.tokens(Work(15, 15 * 60), 0) >= device.pace.tokens(Work(1, 60), 0)


def test_without_sequences_that_decode_there_is_no_limit():
    pace = PrefillPace(2.0, MOST)
    assert pace.tokens(Work(3, 9), 0) == MOST  # before anything is known
    for start in range(0, 50 * MOST, MOST):
        pace.observe(10**9, Work().with_chunk(start, MOST))
        assert pace.tokens(Work(), start) == MOST


def test_the_first_chunk_beside_others_is_short_whatever_seems_to_be_known():
    pace = PrefillPace(2.0, MOST)
    pace.observe(10**9, Work().with_chunk(0, MOST))
    pace.observe(10**12, Work(3, 90))
    assert pace.tokens(Work(3, 93), 0) == FIRST_TOKENS


def test_now_and_then_there_is_a_step_without_prompts_to_see_what_that_takes():
    pace, others = PrefillPace(2.0, MOST), Work(4, 400)
    pace.observe(10**9, Work().with_chunk(0, MOST))
    sizes = []
    for _ in range(30):
        sizes.append(pace.tokens(others, 0))
        pace.observe(10**9, others.with_chunk(0, sizes[-1]) if sizes[-1] else others)
    assert [k for k, size in enumerate(sizes) if not size] == [0, 9, 18, 27]


def test_costs_are_those_of_the_device_as_far_as_steps_tell_them_apart():
    random, true_ns, cost = np.random.default_rng(0), np.array((30, 1.8, 0.011, 4, 0.007, 1.3, 0.00125)) * 1e6, StepCost()

    def work():
        start, count = int(random.integers(0, 4000)), int(random.integers(2, 200))
        rows = int(random.integers(0, 64))
        others = Work(rows, rows * int(random.integers(20, 600)))
        return others.with_chunk(start, count) if random.random() < 0.7 else others

    for _ in range(3000):
        one = work()
        cost.observe(int(true_ns @ (1.0, *one) * np.exp(random.normal(0, 0.1))), one)
    for _ in range(100):
        one = work()
        assert cost.ns(one) == pytest.approx(true_ns @ (1.0, *one), rel=0.2)
    assert cost.chunk(0, 0.0)[0] == 0
    fitting, _ = cost.chunk(1000, 50e6)
    assert cost.ns(Work(4, 99).with_chunk(1000, round(fitting))) - cost.ns(Work(4, 99)) == pytest.approx(50e6, rel=0.1)


def test_steps_that_take_no_time_do_no_harm():
    pace = PrefillPace(2.0, MOST)
    for k in range(300):
        others = Work(4, 4 * k)
        count = pace.tokens(others, k)
        pace.observe(0, others.with_chunk(k, count) if count else others)
    pace.observe(0, others)
    assert LEAST_TOKENS <= pace.tokens(Work(4, 4), 0) <= MOST
