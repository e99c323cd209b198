"""TensorHandlers for tests."""

import os
import threading
import time

import torch

from gpuworker import TensorHandler, TensorSpec

FLOATS = TensorSpec("float32", ("n",))


class Doubled(TensorHandler):
    """Bare arrays of four."""

    inputs = TensorSpec("float32", (4,))
    outputs = TensorSpec("float32", (4,))

    def forward(self, x):
        return x * 2


class Summed(TensorHandler):
    """Variable lengths, two inputs, two outputs; sums would show what padding or another request has left behind."""

    inputs = {"x": TensorSpec("float32", ("n",), pad_value=1e9, mask="mask", lengths="lengths"), "scale": TensorSpec("float32", ())}
    outputs = {"y": FLOATS, "sum": TensorSpec("float64", ())}
    max_extents = {"n": 300}

    def __init__(self):
        self.shapes = []

    def forward(self, batch):
        x, mask = batch["x"], batch["mask"]
        self.shapes.append(tuple(x.shape))
        assert torch.equal(mask.sum(1), batch["lengths"])
        y = x * mask * batch["scale"][:, None]
        return {"y": y, "sum": y.double().sum(1)}


class Held(TensorHandler):
    """Each batch waits to be let go, while shut."""

    inputs = TensorSpec("int64", ())
    outputs = TensorSpec("int64", ())

    def __init__(self):
        self.batches, self.gate, self.entered = [], threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def warmup(self):
        return None

    def forward(self, x):
        self.batches.append(x.tolist())
        self.entered.release()
        assert self.gate.wait(60), "the test never opened the gate"
        return x + 1

    def wait_entered(self):
        assert self.entered.acquire(timeout=60), "no batch came"


class Fails(TensorHandler):
    """On negative numbers with a ValueError, on 1000 and more rows at once as told by `most`."""

    inputs = TensorSpec("float32", (1,))
    outputs = TensorSpec("float32", (1,))

    def __init__(self, most=10**9):
        self.most, self.rows = most, []

    def warmup(self):
        return None

    def forward(self, x):
        self.rows.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        if (x < 0).any():
            raise ValueError("negative")
        return x + 1


class LosesItsDevice(TensorHandler):
    """While there is the file that is named in the environment; the first time removes it if it is empty."""

    inputs = TensorSpec("float32", (1,))
    outputs = TensorSpec("float32", (1,))

    def warmup(self):
        return None

    def forward(self, x):
        file = os.environ["GPUWORKER_TEST_LOSE"]
        if os.path.exists(file):
            if not os.path.getsize(file):
                os.remove(file)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x + 1


class Sticks(TensorHandler):
    """On negative numbers, as long as there is the file that is named in the environment."""

    inputs = TensorSpec("float32", (1,))
    outputs = TensorSpec("float32", (1,))

    def warmup(self):
        return None

    def forward(self, x):
        while (x < 0).any() and os.path.exists(os.environ["GPUWORKER_TEST_HELD"]):
            time.sleep(0.01)
        return x + 1
