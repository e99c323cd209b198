"""What people and their tools watch: health, Prometheus, the status page."""

from __future__ import annotations

from .. import health, metrics, page
from ..replies import encode
from .exchange import Exchange, encoded
from .models import Models


class Watching:
    """The endpoints, for the workers of these models."""

    def __init__(self, models: Models, stale_heartbeat_s: float, long_batch_s: float) -> None:
        self._models, self._judgement = models, (stale_heartbeat_s, long_batch_s)
        self._workers = list(dict.fromkeys(model.worker for model in models.values()))

    async def healthz(self, exchange: Exchange) -> None:
        """GET /healthz: every model's state as in frontends/health.py."""
        states = {name: health.check(model.worker, *self._judgement) for name, model in self._models.items()}
        await exchange.reply(200 if all(state["status"] == "ok" for state in states.values()) else 503, encode(states))

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics: see frontends/metrics.py."""
        await exchange.reply(200, metrics.render(self._workers), encoded((("Content-Type", metrics.CONTENT_TYPE),)))

    async def page(self, exchange: Exchange) -> None:
        """GET /: see frontends/page.py."""
        await exchange.reply(200, page.page(), encoded(page.PAGE_HEADERS))

    async def status(self, exchange: Exchange) -> None:
        """GET /status.json, for the page."""
        await exchange.reply(200, encode(page.snapshot(self._workers)), encoded(page.DATA_HEADERS))
