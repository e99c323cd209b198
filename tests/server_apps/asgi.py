"""For servers with an event loop."""

import json
import os

import gpuworker

client = gpuworker.connect_async("embed", connect_timeout_s=30)


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await client.aclose()
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = json.dumps(await client.submit(["web", os.getpid(), scope["path"]], timeout=60)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
