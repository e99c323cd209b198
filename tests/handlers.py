"""Handlers that spawned owners import by name."""

import ctypes
import os
import signal
import sys
import time


def identity(requests):
    return requests


def owner_pid(requests):
    return [os.getpid()] * len(requests)


def double(requests):
    return [request * 2 for request in requests]


def dies_of_poison(requests):
    if "poison" in requests:
        os.kill(os.getpid(), signal.SIGKILL)
    return requests


def fork_a_child(requests):
    """Answers with the pid of a forked child that does nothing."""
    child = os.fork()
    if not child:
        signal.pause()
    return [child] * len(requests)


def hold_while_file_exists(requests):
    """Requests are paths: holds the batch while the first one exists."""
    while os.path.exists(requests[0]):
        time.sleep(0.005)
    return requests


class Model:
    """All the optional parts of a handler."""

    def load(self):
        self.log = ["load"]

    def warmup(self):
        self.log.append("warmup")
        return ["example"]

    def run_batch(self, requests):
        self.log.append(len(requests))
        return [list(self.log)] * len(requests)


class FailsToLoad:
    def load(self):
        raise FileNotFoundError("weights.bin is not there")

    def run_batch(self, requests):
        return requests


class SlowToLoad:
    """Loads for as long as a file exists."""

    def __init__(self, file):
        self.file = file

    def load(self):
        while os.path.exists(self.file):
            time.sleep(0.005)

    def run_batch(self, requests):
        return requests


def fails_if_told(requests):
    answers = {"large": bytes(1 << 20), "unsupported": object()}
    if "fail" in requests:
        raise ValueError("told to")
    return [answers.get(request, request) if isinstance(request, str) else request for request in requests]


def obeys(requests):
    """Each request is a list: a verb of Verbs and its arguments."""
    return [getattr(Verbs, verb)(*arguments) for verb, *arguments in requests]


class Verbs:
    echo = staticmethod(lambda value: value)
    pid = staticmethod(os.getpid)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def leave(status):
        sys.exit(status)

    @staticmethod
    def hold(file):
        while os.path.exists(file):
            time.sleep(0.005)
        return "held"

    @staticmethod
    def catch(signal_name, file):
        """Until the signal comes, which is handled as before too; or the file is gone."""
        number, came = signal.Signals[signal_name], []
        before = signal.getsignal(number)
        signal.signal(number, lambda *args: (came.append(number), before(*args)))
        while not came and os.path.exists(file):
            time.sleep(0.005)
        return "caught" if came else "missed"

    @staticmethod
    def hog():
        """Keeps the GIL for ever."""
        ctypes.PyDLL(None).sleep(10_000)

    @staticmethod
    def write(mebibytes, last):
        line = b"x" * 1023 + b"\n"
        for _ in range(mebibytes):
            os.write(2, line * 1024)
        os.write(2, last.encode() + b"\n")

    @staticmethod
    def daemon():
        """Leaves a daemon behind: twice forked, in a session of its own. -> its pid."""
        read, write = os.pipe()
        if not os.fork():
            os.setsid()
            daemon = os.fork()
            if daemon:
                os.write(write, str(daemon).encode())
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        pid = int(os.read(read, 20))
        os.close(read)
        os.close(write)
        return pid


class Loads:
    """Told by files in a folder how its loading goes; leaves a file there for each time it began, and one for each that it was done."""

    def __init__(self, folder):
        self.folder = folder

    def load(self):
        (self.folder / f"begun-{os.getpid()}").touch()
        Verbs.hold(self.folder / "hold")
        if (self.folder / "raise").exists():
            raise FileNotFoundError("weights.bin is not there")
        if (self.folder / "die").exists():
            os.write(2, b"GPU has fallen off the bus\n")
            Verbs.die()
        (self.folder / f"done-{os.getpid()}").touch()

    run_batch = staticmethod(obeys)
