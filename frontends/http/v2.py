"""The Open Inference Protocol (KServe V2, https://github.com/kserve/open-inference-protocol) with the binary tensor data extension.

Errors are {"error": "..."}. There are no versions of models. Of parameters, "timeout" (microseconds, as Triton has it) and "binary_data_output" are heeded; those of
other extensions are refused.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

import gpuworker
from gpuworker import Declaration, InvalidRequest, UnsupportedPayload

from .. import health
from ..replies import HttpError, Reply, encode, problem_of
from . import rows, tensors
from .exchange import Exchange, too_long
from .models import Model, Models

LENGTH_HEADER = b"inference-header-content-length"
BINARY = (b"content-type", b"application/octet-stream")
_SERVER_PARAMETERS = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority"})
_TENSOR_PARAMETERS = frozenset({"shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification"})
MOST_INPUTS = 1024


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] | None = None


_decode = msgspec.json.Decoder(_Request).decode


class Inference:
    """The protocol's endpoints. timeout_s: the longest that a request may take. json_limit: bytes of JSON that are parsed."""

    def __init__(self, models: Models, title: str, timeout_s: float, json_limit: int, stale_heartbeat_s: float, long_batch_s: float) -> None:
        self._models, self._title, self._timeout_s, self._json_limit = models, title, timeout_s, json_limit
        self._judgement = stale_heartbeat_s, long_batch_s

    @staticmethod
    def failure(error: Exception) -> Reply:
        """What is answered for an error."""
        problem = problem_of(error, _was_sent(error))
        return Reply(problem.status, encode({"error": problem.message}), problem.headers)

    async def infer(self, exchange: Exchange, model: Model) -> None:
        """POST /v2/models/NAME/infer"""
        asked, binary = self._parsed(exchange, await exchange.body())
        declaration = model.declaration()
        inputs = _inputs(asked, binary)
        _check_outputs(asked, declaration)
        timeout_s = self._timeout(exchange, asked)
        requests = await rows.tokenised(declaration, rows.requests_of(declaration, inputs))
        with exchange:
            answers = await model.answers(requests, timeout_s)
        body, head_bytes = _response(model.name, asked, answers)
        if head_bytes:
            await exchange.reply(200, body, (BINARY, (LENGTH_HEADER, b"%d" % head_bytes)))
        else:
            await exchange.reply(200, body)

    async def server(self, exchange: Exchange) -> None:
        """GET /v2"""
        about = {"name": self._title, "version": gpuworker.__version__, "extensions": ["binary_tensor_data"]}
        await exchange.reply(200, encode(about))

    async def live(self, exchange: Exchange) -> None:
        """GET /v2/health/live"""
        await exchange.reply(200, b'{"live":true}')

    async def ready(self, exchange: Exchange) -> None:
        """GET /v2/health/ready: 200 when all models can be sent requests, else 503."""
        states = {name: self._status(model) for name, model in self._models.items()}
        is_ready = all(state == "ok" for state in states.values())
        await exchange.reply(200 if is_ready else 503, encode({"ready": is_ready, "models": states}))

    async def model_ready(self, exchange: Exchange, model: Model) -> None:
        """GET /v2/models/NAME/ready"""
        state = self._status(model)
        await exchange.reply(200 if state == "ok" else 503, encode({"name": model.name, "ready": state == "ok", "status": state}))

    async def metadata(self, exchange: Exchange, model: Model) -> None:
        """GET /v2/models/NAME"""
        declaration = model.declaration()
        about = {"name": model.name, "versions": [], "platform": f"gpuworker_{declaration.kind}", **_tensors(declaration)}
        await exchange.reply(200, encode(about))

    def _status(self, model: Model) -> str:
        status: str = health.check(model.worker, *self._judgement)["status"]
        return status

    def _parsed(self, exchange: Exchange, body: bytes) -> tuple[_Request, memoryview]:
        """-> (the JSON part, the binary part)."""
        declared = exchange.headers.get(LENGTH_HEADER)
        length = len(body)
        if declared is not None:
            if not declared.isdigit() or len(declared) > 19 or int(declared) > length:
                raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", "Inference-Header-Content-Length is no length within the body")
            length = int(declared)
        if length > self._json_limit:
            raise too_long(self._json_limit, "the JSON", "; send tensors as binary data")
        whole = memoryview(body)
        try:
            return _decode(whole[:length]), whole[length:]
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", f"the body is no inference request: {error}") from None

    def _timeout(self, exchange: Exchange, asked: _Request) -> float:
        for name in _SERVER_PARAMETERS.intersection(asked.parameters):
            if asked.parameters[name]:
                raise InvalidRequest(f"the parameter {name!r} is not supported")
        timeout_s = exchange.timeout_s(self._timeout_s)
        timeout_us = asked.parameters.get("timeout")
        if timeout_us is None:
            return timeout_s
        if type(timeout_us) is not int or timeout_us < 0:
            raise InvalidRequest("the parameter 'timeout' is an integer, microseconds")
        return min(timeout_s, min(timeout_us, 1 << 53) / 1e6) if timeout_us else timeout_s  # 0: none, as Triton has it


def _inputs(asked: _Request, binary: memoryview) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    if len(asked.inputs) > MOST_INPUTS:
        raise InvalidRequest(f"{len(asked.inputs):,} inputs; give at most {MOST_INPUTS:,}")
    for one in asked.inputs:
        if one.name in found:
            raise InvalidRequest(f"input {one.name!r:.100} is there twice")
        _refuse(one.name, one.parameters)
        size = one.parameters.get("binary_data_size")
        if size is None:
            found[one.name] = tensors.from_json(one.name, one.datatype, one.shape, one.data)
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - at or one.data is not None:
            raise InvalidRequest(f"input {one.name!r:.100}: its binary_data_size is no length of what follows the JSON, or it has data there too")
        column = tensors.from_bytes(one.name, one.datatype, one.shape, binary[at : at + size])
        at += size
        found[one.name] = _texts(column) if one.datatype == "BYTES" and one.parameters.get("content_type") == "str" else column
    if at != len(binary):
        raise InvalidRequest(f"{len(binary) - at:,} bytes behind the JSON belong to no input")
    return found


def _texts(column: list[Any]) -> list[Any]:
    try:
        return [_texts(one) if isinstance(one, list) else one.decode() for one in column]
    except UnicodeDecodeError:
        raise InvalidRequest("a text that is no UTF-8") from None


def _check_outputs(asked: _Request, declaration: Declaration) -> None:
    """What can be refused before anything is sent is."""
    for one in asked.outputs or ():
        _refuse(one.name, one.parameters)
        if declaration.outputs and one.name not in declaration.outputs:
            raise InvalidRequest(f"there is no output {one.name!r:.100}; there are {', '.join(map(repr, declaration.outputs))}")


def _refuse(name: str, parameters: dict[str, Any]) -> None:
    for parameter in _TENSOR_PARAMETERS.intersection(parameters):
        raise InvalidRequest(f"{name!r:.100}: the parameter {parameter!r} is not supported")


def _response(model: str, asked: _Request, answers: list[Any]) -> tuple[bytes, int]:
    """-> (the body, the length of the JSON before binary data; 0 where there is none)."""
    wanted = {one.name: one for one in asked.outputs} if asked.outputs else None
    by_default = asked.parameters.get("binary_data_output") is True
    outputs: list[dict[str, Any]] = []
    parts: list[Any] = [b""]
    try:
        for name, column in rows.outputs_of(answers, list(wanted) if wanted else None).items():
            is_binary = wanted[name].parameters.get("binary_data", by_default) is True if wanted else by_default
            if is_binary:
                datatype, shape, data = tensors.to_bytes(column)
                size = data.nbytes if not isinstance(data, bytes) else len(data)
                outputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}})
                parts.append(data)
            else:
                datatype, shape, values = tensors.to_json(column)
                outputs.append({"name": name, "datatype": datatype, "shape": shape, "data": values})
        parts[0] = encode({"model_name": model, **({"id": asked.id} if asked.id else {}), "outputs": outputs})
    except InvalidRequest:
        raise
    except ValueError as error:
        raise UnsupportedPayload(f"the handler's answer is no tensor: {error}") from error
    return (b"".join(parts), len(parts[0])) if len(parts) > 1 else (parts[0], 0)


def _tensors(declaration: Declaration) -> dict[str, Any]:
    """-1: whatever a request has. None where nothing is declared."""
    return {"inputs": _specs(declaration.inputs), "outputs": _specs(declaration.outputs)}


def _specs(specs: Any) -> list[dict[str, Any]]:
    found = []
    for name, spec in specs.items():
        try:
            datatype = tensors.name_of(spec.numpy_dtype)
        except ValueError:
            datatype = spec.dtype.upper()  # complex numbers: the protocol has none, and whoever reads this should see why
        found.append({"name": name, "datatype": datatype, "shape": [-1, *(extent if isinstance(extent, int) else -1 for extent in spec.shape)]})
    return found


def _was_sent(error: Exception) -> bool:
    """Errors of ours are about the request unless they say that they are not."""
    return not isinstance(error, (InvalidRequest, HttpError)) and getattr(error, "what", "") != "request"
