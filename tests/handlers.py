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
