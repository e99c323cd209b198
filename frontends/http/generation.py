"""POST /v1/completions and /v1/chat/completions: whole answers, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from gpuworker import AsyncClient, Declaration, Generation, InvalidRequest

from ..replies import encode
from . import fields
from .choices import Chats, Completions, TextOf, usage_of
from .exchange import LONG_TEXT, SLOW_READER_S, Exchange
from .models import Model
from .openai import BadField, OpenAI
from .stream import Events

A = TypeVar("A", bound=fields.Asked)


class TextGeneration:
    """The endpoints. timeout_s: the longest that an answer may take."""

    def __init__(self, openai: OpenAI, timeout_s: float) -> None:
        self._openai, self._timeout_s = openai, timeout_s

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions"""
        asked = await self._openai.parsed(exchange, fields.Completion, fields.REFUSED_COMPLETION)
        model, declaration = self._model(asked)
        await self._answer(exchange, model, asked, declaration, asked.prompts(), Completions(asked.model, _texts(declaration)))

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions"""
        asked = await self._openai.parsed(exchange, fields.Chat, fields.REFUSED_CHAT)
        model, declaration = self._model(asked)
        await self._answer(exchange, model, asked, declaration, [asked.prompt()], Chats(asked.model, _texts(declaration)))

    def _model(self, asked: fields.Asked) -> tuple[Model, Declaration]:
        model = self._openai.model(asked.model)
        declaration = model.declaration()
        if declaration.kind != "generation":
            raise BadField("model", f"model {asked.model!r} does not generate text")
        return model, declaration

    async def _answer(
        self, exchange: Exchange, model: Model, asked: fields.Asked, declaration: Declaration, prompts: list[Any], shape: Completions
    ) -> None:
        prompts = await _short(prompts, declaration, asked.n)
        options = {**asked.options(), "timeout": exchange.timeout_s(self._timeout_s)}
        with exchange:
            exchange.watch()
            try:
                if asked.stream:
                    exchange.hurry(options["timeout"] + SLOW_READER_S)
                    events = Events(shape, asked.n, asked.stream_options is not None and asked.stream_options.include_usage)
                    await events.send(
                        exchange, model.client, [(prompt, {**options, **_seed(asked, k)}) for prompt in prompts for k in range(asked.n)]
                    )
                    return
                generations = await _together([_generate(model.client, prompt, asked, options) for prompt in prompts])
            except InvalidRequest as error:
                raise _about_field(error) from error
        found = [one for several in generations for one in several]
        await exchange.reply(200, encode(shape.answer(found, usage_of([one.usage for one in found], asked.n))))


async def _short(prompts: list[Any], declaration: Declaration, n: int) -> list[Any]:
    """Long texts as token ids: nobody waits for the tokenizer. n: how often each is tokenised if it stays a text."""
    if n * sum(map(_letters, prompts)) <= LONG_TEXT:
        return prompts
    return await asyncio.to_thread(lambda: [declaration.ids_of(prompt) if _letters(prompt) else prompt for prompt in prompts])


def _letters(prompt: Any) -> int:
    """How many a prompt has, with what a template puts around each of its messages; none if it is token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["role"]) + len(message["content"]) + 16 for message in prompt) if prompt and isinstance(prompt[0], dict) else 0


async def _generate(client: AsyncClient, prompt: Any, asked: fields.Asked, options: dict[str, Any]) -> list[Generation]:
    found = await client.generate(prompt, n=asked.n, seed=asked.seed, **options)
    return found if isinstance(found, list) else [found]


async def _together(calls: Iterable[Any]) -> list[Any]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seed(asked: fields.Asked, sample: int) -> dict[str, Any]:
    """As Client.generate has it for one of several."""
    return {"seed": None if asked.seed is None else asked.seed if not sample else (asked.seed + sample) % (1 << 64)}


def _about_field(error: InvalidRequest) -> Exception:
    """Which field it is that the client does not take, where its message says so."""
    name = str(error).partition("=")[0].partition(":")[0]
    return BadField(name, str(error)) if name in msgspec.structs.asdict(fields.Asked(model="")) or name == "prompt" else error


def _texts(declaration: Declaration) -> TextOf:
    """Models without a tokenizer have no texts; their tokens are told by their numbers."""

    def text_of(token: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return declaration.text_of(token)
        return f"token_id:{token}"

    return text_of
