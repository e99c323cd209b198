"""The handler for gpuworker."""


def identity(requests):
    return requests
