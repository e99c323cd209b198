"""What the endpoints of OpenAI's API (https://platform.openai.com/docs/api-reference) have in common: models, fields, errors."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from gpuworker import QueueFull

from ..replies import HttpError, Reply, encode, problem_of, sayable
from .exchange import Exchange, too_long
from .models import Model, Models

T = TypeVar("T", bound=msgspec.Struct)
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")
)  # fmt: skip
"""Fields that ask for nothing that could be missed here."""


class BadField(HttpError):
    """A field that cannot be as it is. param: its name; code: what is wrong, in a word."""

    def __init__(self, param: str, message: str, code: str = "invalid_value", status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(status, "BadRequest", message)
        self.param, self.code = param, code


class OpenAI:
    """Bound to the models. json_limit: bytes of JSON that are parsed."""

    def __init__(self, models: Models, json_limit: int) -> None:
        self._models, self._json_limit, self._created_s = models, json_limit, int(time.time())

    @staticmethod
    def failure(error: Exception) -> Reply:
        """What is answered for an error."""
        problem = problem_of(error, was_sent=not isinstance(error, (ValueError, HttpError)) and getattr(error, "what", "") != "request")
        status = HTTPStatus.TOO_MANY_REQUESTS if isinstance(error, QueueFull) else problem.status
        return Reply(status, encode({"error": error_object(error)}), problem.headers)

    async def parsed(self, exchange: Exchange, kind: type[T], refused: Mapping[str, Collection[Any]]) -> T:
        """The request's body as `kind`. refused: fields that are not supported, with the values that ask for nothing. Raises HttpError."""
        body = await exchange.body()
        if len(body) > self._json_limit:
            raise too_long(self._json_limit, "the JSON")
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", f"the body is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", "the body is no JSON object")
        known = kind.__struct_fields__
        given = {}
        for name, value in fields.items():
            if name in refused:
                if value is not None and value not in refused[name]:
                    raise BadField(name, f"{name!r} is not supported here; leave it out", "unsupported_parameter")
            elif name in known:
                if value is not None:
                    given[name] = value
            elif name not in HARMLESS:
                raise BadField(name, f"there is no field {name!r:.100}", "unknown_parameter")
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            text = str(error)
            where = text.rpartition("`$.")[2].partition("`")[0] if "`$." in text else ""
            raise BadField(where.partition("[")[0].partition(".")[0], text) from None

    def model(self, name: str) -> Model:
        """By the name in a request. Raises BadField."""
        if name not in self._models:
            raise BadField("model", f"there is no model {name!r:.100}", "model_not_found", HTTPStatus.NOT_FOUND)
        return self._models[name]

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/models"""
        await exchange.reply(200, encode({"object": "list", "data": [self._about(model) for model in self._models.values()]}))

    async def retrieve(self, exchange: Exchange, model: Model) -> None:
        """GET /v1/models/NAME"""
        await exchange.reply(200, encode(self._about(model)))

    def _about(self, model: Model) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": self._created_s, "owned_by": "gpuworker"}


def error_object(error: Exception) -> dict[str, Any]:
    """As OpenAI's clients read it. type: which of theirs the status stands for; code: more exactly."""
    problem = problem_of(error, was_sent=not isinstance(error, (ValueError, HttpError)))
    if isinstance(error, BadField):
        return {"message": sayable(error), "type": "invalid_request_error", "param": error.param or None, "code": error.code}
    status = problem.status
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = problem.kind
    if isinstance(error, QueueFull):
        kind = "rate_limit_error"
    elif status == HTTPStatus.UNAUTHORIZED:
        kind, code = "authentication_error", "invalid_api_key"
    elif code == "ModelNotFound":
        code = "model_not_found"
    return {"message": problem.message, "type": kind, "param": None, "code": code}
