"""The handler: requests are ("web", pid, id) of the applications beside this file, or ("hold", path) of the test itself."""

import collections
import os

seen = collections.Counter()


def run_batch(requests):
    """Each answer tells of its batch: from which processes its requests came, and where it ran; and how often this request was here."""
    for request in requests:
        seen[request[-1]] += 1
        if request[0] == "hold":
            with open(request[1]):  # a FIFO: until the test opens its other end
                pass
    web_workers = [request[1] for request in requests if request[0] == "web"]
    return [{"web_workers": web_workers, "owner": os.getpid(), "times": seen[request[-1]]} for request in requests]
