"""FastAPI, one owner for all its processes. gpuworker run examples.lengths:run_batch --name measure -- uvicorn --workers 2 examples.fastapi_app:app

curl -s localhost:8000/lengths -H "Content-Type: application/json" -d '["one", "three"]'
"""

from contextlib import asynccontextmanager

from fastapi import FastAPI

import gpuworker


@asynccontextmanager
async def lifespan(app):
    async with gpuworker.connect_async("measure") as app.client:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/lengths")
async def lengths(texts: list[str]) -> list[int]:
    return [answer async for answer in app.client.map(texts, timeout=5)]  # batched with everybody else's
