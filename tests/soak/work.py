"""What the frontends ask for. `answer` is run by the owner, and by the frontend to check what came back."""

import time

import numpy as np


class SoakError(Exception):
    """Raised by the handler itself, for a whole batch."""


def answer(request, here=False):
    """The one right answer to a request; an exception instance where that is it. `here`: in the frontend, where nothing need be slow."""
    if isinstance(request, (bytes, str)):
        return request[::-1]
    if isinstance(request, np.ndarray):
        return request * 3 + 1
    op, number = request["op"], request["id"]
    if op == "slow":
        if not here:
            time.sleep(request["ms"] / 1e3)
        return [number, request["ms"]]
    if op == "fail":
        return ValueError(f"no {number}")
    if op == "raise":
        return SoakError(f"never {number}")
    if op == "large":
        array = np.full(request["bytes"], number % 251, np.uint8)
        array[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        return array
    return {"id": number, "twice": [request["value"]] * 2}


def run_batch(requests):
    """The handler."""
    answers = [answer(request) for request in requests]
    for one in answers:
        if isinstance(one, SoakError):
            raise one
    return answers


def is_right(expected, got):
    """Whether a value, or an exception, is the expected one."""
    if isinstance(expected, SoakError):  # not a builtin: it comes back as a RemoteError
        return type(got).__name__ == "RemoteError" and got.type.endswith("SoakError") and got.message == str(expected)
    if isinstance(expected, Exception):
        return type(got) is type(expected) and got.args == expected.args
    if isinstance(expected, np.ndarray):
        return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)
    return type(got) is type(expected) and got == expected


class Requests:
    """A frontend's supply of requests: all different from each other, and from those of any other frontend or life."""

    def __init__(self, chance, serial):
        self._chance, self._number = chance, serial << 24

    def _next(self):
        self._number += 1
        return self._number

    def small(self):
        number, chance = self._next(), self._chance
        kind = chance.randrange(4)
        if kind == 0:
            return number.to_bytes(8, "little") + chance.randbytes(chance.randrange(2000))
        if kind == 1:
            return f"{number} " + "text " * chance.randrange(100)
        if kind == 2:
            return self.array()
        return {"op": "tree", "id": number, "value": ["x", number / 7, None, {"deep": [True, b"\0"]}]}

    def array(self):
        array = np.arange(chance_shape(self._chance), dtype=np.float64)
        array[0] = self._next()
        return array

    def spilled(self):
        """Does not fit its slot."""
        return self._next().to_bytes(8, "little") + bytes(self._chance.randrange(10_000, 200_000))

    def large(self):
        """Its answer does not fit its slot."""
        return {"op": "large", "id": self._next(), "bytes": self._chance.randrange(10_000, 200_000)}

    def slow(self, most_ms=20):
        return {"op": "slow", "id": self._next(), "ms": self._chance.randrange(1, most_ms)}

    def failing(self):
        return {"op": self._chance.choice(("fail", "fail", "fail", "raise")), "id": self._next()}


def chance_shape(chance):
    """Mostly the same length: answers of one shape in a row are received another way."""
    return 64 if chance.random() < 0.7 else chance.randrange(1, 200)
