"""What an owner is to run, as plain data: a supervisor hands it on without importing the handler."""

from __future__ import annotations

import pickle
import sys
from typing import Any, NamedTuple

from gpuworker.worker.handler import name_of


class Job(NamedTuple):
    """`handler` is pickled by reference: it travels as its import path. `preparation`: how to import the main script that it may live in."""

    name: str
    options: dict[str, Any]
    handler: bytes
    preparation: dict[str, Any]

    @classmethod
    def of(cls, handler: Any, name: str, options: dict[str, Any]) -> Job:
        """Raises TypeError for a handler that another process cannot import."""
        try:
            pickled = pickle.dumps(handler)
        except Exception as error:
            raise TypeError(
                f"handler {name_of(handler)} cannot be imported by another process ({error}); "
                "define it at the top level of a module, name it as 'module:attr', or use in_process=True"
            ) from None
        if isinstance(handler, str):
            return cls(name, options, pickled, {})
        from multiprocessing import spawn  # no server that forks should have to load it

        preparation = spawn.get_preparation_data(f"gpuworker {name}")
        preparation.pop("authkey", None)
        if b"__main__" not in pickled:  # only a handler that lives in the main script makes the owner import that script
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        return cls(name, options, pickled, preparation)


def send(fd: int, message: Any) -> None:
    """Writes a message of any size to a pipe. Raises BrokenPipeError."""
    blob = pickle.dumps(message)
    with open(fd, "wb", closefd=False) as pipe:
        pipe.write(len(blob).to_bytes(8, "little") + blob)


def receive(fd: int) -> Any:
    """Reads exactly one message: what follows it stays in the pipe. Exits when the other end is gone."""
    with open(fd, "rb", buffering=0, closefd=False) as pipe:
        blob = _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))
    return pickle.loads(blob)


def _exactly(pipe: Any, size: int) -> bytes:
    blob = b""
    while len(blob) < size:
        part = pipe.read(size - len(blob))
        if not part:
            sys.exit("the process that started this one is gone")
        blob += part
    return blob
