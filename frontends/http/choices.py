"""Generated text in the words of OpenAI's API: whole answers, and the chunks of streamed ones, of completions and of chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from gpuworker import Delta, Generation, TokenLogprob, Usage

TextOf = Callable[[int], str]


class Completions:
    """The shape of /v1/completions. text_of: a token's text, for logprobs."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, text_of: TextOf) -> None:
        self.model, self._text_of = model, text_of
        self.id, self.created_s = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._offsets: dict[int, int] = {}

    def answer(self, generations: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        """All of it at once."""
        choices = [self.choice(index, one) for index, one in enumerate(generations)]
        return {"id": self.id, "object": self.whole, "created": self.created_s, "model": self.model, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One event of a stream."""
        return {"id": self.id, "object": self.part, "created": self.created_s, "model": self.model, "choices": choices, **more}

    def choice(self, index: int, one: Generation) -> dict[str, Any]:
        """A whole answer."""
        return {"index": index, "text": one.text, "logprobs": self.logprobs(index, one.logprobs), "finish_reason": one.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before the first text of a choice, if anything does."""
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return {"index": index, "text": delta.text, "logprobs": self.logprobs(index, delta.logprobs), "finish_reason": None}

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """After the last piece."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def logprobs(self, index: int, found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """text_offset counts the letters of the tokens by themselves, from the first one that was generated."""
        if found is None:
            return None
        texts = [self._text_of(one.token) for one in found]
        at, offsets = self._offsets.get(index, 0), []
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{self._text_of(token): logprob for token, logprob in one.top} for one in found],
            "text_offset": offsets,
        }


class Chats(Completions):
    """The shape of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, one: Generation) -> dict[str, Any]:
        """A whole answer."""
        message = {"role": "assistant", "content": one.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self.logprobs(index, one.logprobs), "finish_reason": one.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return {"index": index, "delta": {"content": delta.text}, "logprobs": self.logprobs(index, delta.logprobs), "finish_reason": None}

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """After the last piece."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def logprobs(self, index: int, found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """One entry for each token."""
        if found is None:
            return None
        return {
            "content": [{**self._token(one.token, one.logprob), "top_logprobs": [self._token(*top) for top in one.top]} for one in found],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def usage_of(usages: Sequence[Usage], n: int) -> dict[str, int]:
    """Of all choices together; a prompt counts once for its n."""
    prompt = sum(one.prompt_tokens for one in usages[::n])
    completion = sum(one.completion_tokens for one in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
