"""What a request for generated text may ask for, as OpenAI has it, and what that is for Client.generate.

Beyond OpenAI's there are top_k, min_p, repetition_penalty, ignore_eos and stop_token_ids, which its clients send as extra_body. Without max_tokens a completion
has 16 tokens, as OpenAI's has, and a chat as many as there is room for. What is not supported is refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .openai import BadField

MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 32, 512
"""Strings, and letters of one: all are looked for at each token, in the event loop."""
REFUSED_COMPLETION: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
"""Fields that are not supported, with the values that ask for nothing."""
REFUSED_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none",), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]
_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


class StreamOptions(msgspec.Struct):
    """Of a stream. include_obfuscation: nobody needs it here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(msgspec.Struct, kw_only=True):
    """What both kinds have."""

    model: str
    max_tokens: _Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] = 1
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: _Ids = []

    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens

    def top_logprobs_wanted(self) -> int | None:
        """None: no logprobs."""
        return None

    def options(self) -> dict[str, Any]:
        """For Client.generate and Client.stream. Raises BadField."""
        if self.stream_options is not None and not self.stream:
            raise BadField("stream_options", "stream_options are for stream=true only")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in stops):
            raise BadField("stop", f"give at most {MOST_STOPS} strings of at most {LONGEST_STOP} letters")
        return {
            "max_tokens": self.most_tokens(), "stop": self.stop, "stop_ids": self.stop_token_ids, "ignore_eos": self.ignore_eos, "temperature": self.temperature,
            "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p, "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "logit_bias": self._bias(), "logprobs": self.top_logprobs_wanted(),
        }  # fmt: skip

    def _bias(self) -> dict[int, float] | None:
        try:
            return {int(token): value for token, value in self.logit_bias.items()} or None
        except ValueError:
            raise BadField("logit_bias", "logit_bias goes from token ids, as text, to numbers") from None


class Completion(Asked, kw_only=True):
    """Of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: _Count | None = 16
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def top_logprobs_wanted(self) -> int | None:
        """None: no logprobs."""
        return self.logprobs

    def prompts(self) -> list[Any]:
        """Texts, or lists of token ids. Raises BadField."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = {type(one) for one in given}
        if len(kinds) != 1:
            raise BadField("prompt", "give a text, token ids, or a list of either that is not empty")
        prompts: list[Any] = [given] if kinds == {int} else given
        if len(prompts) * self.n > MOST_CHOICES:
            raise BadField("prompt", f"{len(prompts)} prompts with n={self.n} are more than {MOST_CHOICES} choices; send fewer at a time")
        return prompts


class Chat(Asked, kw_only=True):
    """Of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top_logprobs_wanted(self) -> int | None:
        """None: no logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadField("top_logprobs", "top_logprobs are for logprobs=true only")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> list[dict[str, str]]:
        """The messages, as templates know them: all text, and "developer" is "system". Raises BadField."""
        if not self.messages:
            raise BadField("messages", "give at least one message")
        return [_message(one) for one in self.messages]


def _message(given: dict[str, Any]) -> dict[str, str]:
    role, content = given.get("role"), given.get("content")
    for name in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if given.get(name):
            raise BadField("messages", f"messages with {name!r} are not supported", "unsupported_parameter")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise BadField("messages", 'content is text, or parts like {"type": "text", "text": "..."}', "unsupported_parameter")
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadField("messages", 'messages are like {"role": "user", "content": "Hello"}')
    named = {"name": given["name"]} if isinstance(given.get("name"), str) else {}
    return {"role": "system" if role == "developer" else role, "content": content, **named}
