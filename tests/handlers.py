"""Handlers that spawned owners import by name."""

import os
import signal
import time


def identity(requests):
    return requests


def owner_pid(requests):
    return [os.getpid()] * len(requests)


def double(requests):
    return [request * 2 for request in requests]


def kill_owner(requests):
    os.kill(os.getpid(), signal.SIGKILL)
    return requests


def kill_owner_at_second(requests):
    if "second" in requests:
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
