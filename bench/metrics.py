"""What a scrape costs: CPU time of a `gpuworker metrics` server, back to back and at 10 Hz, and whether the owner notices. `python bench/metrics.py`"""

from __future__ import annotations

import http.client
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpuworker
from gpuworker.cli.metrics import server_of

BACK_TO_BACK, AT_10_HZ = 500, 100


def identity(requests):
    return requests


def owner_of(worker):
    """(CPU seconds of the owner's threads, its wakes from sleep)"""
    tasks = pathlib.Path(f"/proc/{worker.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9, worker.stats().owner_parks


def main():
    with gpuworker.Worker(identity, capacity=256) as worker, worker.connect() as client:
        client.submit(0)
        server = server_of([worker.name], "127.0.0.1", 0)
        cpu = []

        def serve():
            clock = time.CLOCK_THREAD_CPUTIME_ID

            def measured(handle):
                def call(*request):
                    began = time.clock_gettime(clock)
                    handle(*request)
                    cpu.append(time.clock_gettime(clock) - began)

                return call

            server.process_request = measured(server.process_request)  # starts a thread for the connection
            server.process_request_thread = measured(server.process_request_thread)  # in which this runs
            server.serve_forever()

        thread = threading.Thread(target=serve)
        thread.start()

        def scrape():
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", "/metrics")
            body = connection.getresponse().read()
            connection.close()
            return body

        print(f"{len(scrape()):,} bytes a scrape")
        for title, scrapes, pause_s in (("back to back", BACK_TO_BACK, 0.0), ("at 10 Hz", AT_10_HZ, 0.1)):
            cpu.clear()
            for _ in range(scrapes):
                scrape()
                time.sleep(pause_s)
            mean_s = sum(cpu) / scrapes
            print(f"{title}: {mean_s * 1e6:.0f} us of CPU a scrape; ten a second are {mean_s * 1000:.2f} % of a core")
        for title, pause_s in (("scraped at 10 Hz", 0.1), ("left alone", 0.0)):
            (cpu_s, wakes), began = owner_of(worker), time.monotonic()
            while time.monotonic() - began < 10:
                if pause_s:
                    scrape()
                time.sleep(pause_s or 1)
            took_s = time.monotonic() - began
            after_s, after = owner_of(worker)
            print(f"owner, {title}: {(after_s - cpu_s) / took_s * 100:.2f} % of a core, {(after - wakes) / took_s:.1f} wakes a second")
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    main()
