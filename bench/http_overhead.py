"""What HTTP costs: an identity model behind gpuworker http, mosec and LitServe, 4 KiB there and back, in turns in one run.

    python bench/http_overhead.py [--seconds 3] [--rounds 5] [--connections 32] [--only NAME ...]

Counts requests/s and the CPU time of all processes of each server, gpuworker's owner among them; the client, one process with keep-alive connections, is not
counted. Two processes each take the requests of gpuworker and LitServe; mosec's are one, in Rust. "floor" is uvicorn with an application that does nothing but give
the body back. The target: at least as many requests per CPU-second as mosec and as LitServe.

mosec and LitServe are installed into an environment of their own (bench/results/http-venv), unless --venv names one that has them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import selectors
import socket
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

HERE = pathlib.Path(__file__).parent
OTHERS = ("mosec==0.9.8", "litserve==0.2.19")
PAYLOAD_BYTES = 4096
SERVERS = ("gpuworker", "floor", "mosec", "litserve")


class Turn(NamedTuple):
    requests: int
    seconds: float
    cpu_s: float


class Server:
    """One that is running. roots: its processes; request: the bytes to send; marker: what must be in each answer."""

    def __init__(self, name: str, port: int, request: bytes, marker: bytes, roots: list[subprocess.Popen[bytes]]) -> None:
        self.name, self.port, self.request, self.marker, self.roots = name, port, request, marker, roots
        self.turns: list[Turn] = []

    def cpu_s(self) -> float:
        total = 0.0
        for root in self.roots:
            for process in (psutil.Process(root.pid), *psutil.Process(root.pid).children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    spent = process.cpu_times()
                    total += spent.user + spent.system
        return total


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    head = {"Host": "127.0.0.1", "Content-Length": str(len(body)), **headers}
    return f"POST {path} HTTP/1.1\r\n".encode() + b"".join(f"{name}: {value}\r\n".encode() for name, value in head.items()) + b"\r\n" + body


@contextlib.contextmanager
def servers(names: Sequence[str], python: str) -> Iterator[list[Server]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(command, cwd=HERE / "http_apps", stdout=subprocess.DEVNULL, start_new_session=True))
        return processes[-1]

    payload = bytes(range(64)) * (PAYLOAD_BYTES // 64)
    found = []
    try:
        for name in names:
            port = free_port()
            if name == "gpuworker":
                worker = f"bench-http-{os.getpid()}"
                tensor = {"name": "input", "datatype": "FP32", "shape": [1, PAYLOAD_BYTES // 4], "parameters": {"binary_data_size": PAYLOAD_BYTES}}
                head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
                request = post("/v2/models/identity/infer", head + payload, {"Inference-Header-Content-Length": str(len(head))})
                owner = start(sys.executable, "-m", "gpuworker.cli", "serve", "identity:identity", "--name", worker)
                front = start(sys.executable, "-m", "gpuworker.cli", "http", f"identity={worker}", "--workers", "2", "--port", str(port))
                found.append(Server(name, port, request, payload, [owner, front]))
            elif name == "floor":
                command = (
                    "-m",
                    "uvicorn",
                    "floor:app",
                    "--workers",
                    "2",
                    "--no-access-log",
                    "--lifespan",
                    "off",
                    "--log-level",
                    "error",
                    "--port",
                    str(port),
                )
                found.append(Server(name, port, post("/", payload, {}), payload, [start(sys.executable, *command)]))
            elif name == "mosec":
                found.append(Server(name, port, post("/inference", payload, {}), payload, [start(python, f"{name}_app.py", str(port))]))
            else:
                text = "x" * PAYLOAD_BYTES
                request = post("/predict", json.dumps({"input": text}).encode(), {"Content-Type": "application/json"})
                found.append(Server(name, port, request, text.encode(), [start(python, f"{name}_app.py", str(port))]))
        for server in found:
            wait_until_it_answers(server)
        yield found
    finally:
        for process in processes:
            for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def wait_until_it_answers(server: Server) -> None:
    give_up = time.monotonic() + 90
    while True:
        try:
            load(server, 1, 0.05)
            return
        except (OSError, RuntimeError) as error:
            if time.monotonic() > give_up:
                raise SystemExit(f"{server.name} does not answer: {error}") from None
            time.sleep(0.3)


class Connection:
    """Sends the request again and again, each when the one before is answered."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer, self._whole = b"", -1
        self.answered = 0

    def send(self) -> None:
        self.socket.sendall(self._server.request)

    def read(self) -> bool:
        """Whether the answer is there. Raises RuntimeError for a wrong one."""
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise RuntimeError("the connection was closed")
        self._answer += piece
        if self._whole < 0 and (end := self._answer.find(b"\r\n\r\n")) >= 0:
            head = self._answer[:end].lower()
            at = head.index(b"content-length:") + 15
            self._whole = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if self._whole < 0 or len(self._answer) < self._whole:
            return False
        if not self._answer.startswith(b"HTTP/1.1 200") or self._server.marker not in self._answer:
            raise RuntimeError(f"a wrong answer: {self._answer[:300]!r}")
        self._answer, self._whole = b"", -1
        self.answered += 1
        return True


def load(server: Server, connections: int, seconds: float) -> Turn:
    made = [Connection(server) for _ in range(connections)]
    selector = selectors.DefaultSelector()
    try:
        for one in made:
            selector.register(one.socket, selectors.EVENT_READ, one)
        before, start = server.cpu_s(), time.monotonic()
        for one in made:
            one.send()
        busy = len(made)
        while busy:
            ready = selector.select(30)
            if not ready:
                raise RuntimeError("no answer for 30 seconds")
            for key, _ in ready:
                if key.data.read():
                    if time.monotonic() - start < seconds:
                        key.data.send()
                    else:
                        busy -= 1
        return Turn(sum(one.answered for one in made), time.monotonic() - start, server.cpu_s() - before)
    finally:
        selector.close()
        for one in made:
            one.socket.close()


def environment(given: str | None) -> str:
    """The interpreter that has the others."""
    folder = pathlib.Path(given) if given else HERE / "results" / "http-venv"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {' and '.join(OTHERS)} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *OTHERS], check=True)
    return str(python)


def median(server: Server, what: str) -> float:
    return statistics.median({"rate": turn.requests / turn.seconds, "per_cpu_s": turn.requests / turn.cpu_s}[what] for turn in server.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--venv", help="an environment with the others")
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=SERVERS)
    options = parser.parse_args()
    with servers(options.only, environment(options.venv) if {"mosec", "litserve"} & {*options.only} else "") as found:
        for server in found:
            load(server, options.connections, 1.0)
        for _ in range(options.rounds):
            for server in found:
                server.turns.append(load(server, options.connections, options.seconds))
        print(f"{PAYLOAD_BYTES:,} bytes, identity, {options.connections} connections; medians of {options.rounds} rounds of {options.seconds:g} s\n")
        print("| | requests/s | requests per CPU-second | CPU-seconds per 100k |\n|---|---:|---:|---:|")
        for server in found:
            each = median(server, "per_cpu_s")
            print(f"| {server.name} | {median(server, 'rate'):,.0f} | {each:,.0f} | {1e5 / each:.1f} |")
        ours = next((server for server in found if server.name == "gpuworker"), None)
        for server in found:
            if ours is not None and server.name in ("mosec", "litserve"):
                ratio = median(ours, "per_cpu_s") / median(server, "per_cpu_s")
                print(f"\ntarget: at least {server.name}'s requests per CPU-second: {ratio:.2f} times, {'met' if ratio >= 1 else 'NOT met'}")


if __name__ == "__main__":
    main()
