"""Calls ASGI applications in this process, as a server would; and clients that leave."""

import asyncio
import json

import httpx2


def call(app, method, path, body=b"", **headers):
    """One request, in an event loop of its own. -> the response."""

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://web") as client:
            return await client.request(method, path, content=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return asyncio.run(run())


def post(app, path, value, **headers):
    """-> (status, the JSON of the answer)."""
    response = call(app, "POST", path, json.dumps(value).encode(), **headers)
    return response.status_code, response.json()


def get(app, path, **headers):
    response = call(app, "GET", path, **headers)
    return response.status_code, response.json()


class Visitor:
    """A connection by hand: what the application sends, when, and a client that can leave or not read."""

    def __init__(self, app, path, body=b"", headers=(), pieces=None):
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "headers": list(headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        self._app, self._pieces = app, list(pieces) if pieces is not None else [body]
        self.sent, self._left, self.reads = [], asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.came = asyncio.Event()

    async def receive(self):
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        self.sent.append(message)
        self.came.set()

    def start(self):
        self.task = asyncio.get_running_loop().create_task(self._app(self.scope, self.receive, self.send))
        return self

    def leave(self):
        self._left.set()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)
