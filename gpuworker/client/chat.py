"""From messages to the text of a prompt, by the template that comes with a model; in the frontend, with the package jinja2.

As transformers' apply_chat_template does it, with add_generation_prompt=True and without tools. A template is a program of whoever made the model, so it runs in
jinja2's sandbox, with nothing to call but what is below.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gpuworker.client.tokenizer import content_of
from gpuworker.errors import GpuWorkerError, InvalidRequest
from gpuworker.sampling import shown

FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LEAST_JINJA = (3, 1, 6)  # earlier ones have known ways out of the sandbox


def render(directory: str, messages: Sequence[Any]) -> str:
    """messages: [{"role": "user", "content": "..."}, ...]. Raises InvalidRequest for what is no conversation, or what the template refuses, and where the model has
    no template; GpuWorkerError or OSError where a file cannot be used."""
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f'messages: give dicts like {{"role": "user", "content": "Hello"}}, not {shown(message)}')
        _check_content(message)
    source, special = _read(directory, tuple(_version(os.path.join(directory, name)) for name in FILES))
    if source is None:
        raise InvalidRequest(f"the model in {directory} has no chat template (chat_template.jinja): give a str, or token ids")
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    template, template_error = _compile(source)
    try:
        text: str = template.render(messages=plain, tools=None, documents=None, add_generation_prompt=True, **special)
    except (template_error, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from error
    return text


def _check_content(message: Mapping[str, Any]) -> None:
    """A template would take most things, and make a text of them that nobody wanted: `None`, or b'Hello' with its b."""
    content = message.get("content")
    has_parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
    says_something_else = content is None and len(message.keys() - {"role", "content", "name"}) > 0  # tool_calls, say; the template knows, or refuses
    if not isinstance(content, str) and not has_parts and not says_something_else:
        raise InvalidRequest(
            f"messages: the content of a message is a str, or a list of parts where the model's template takes them, not {shown(content)}"
        )


def _version(file: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(8)
def _read(directory: str, versions: tuple[Any, ...]) -> tuple[str | None, dict[str, str]]:
    """-> (the template's text, if there is one, and the special tokens that it may name). versions: what the files look like; read again when that changes."""
    template, *configs = (os.path.join(directory, name) for name in FILES)
    config, special_map = map(_json, configs)
    known = {**special_map, **{name: value for name, value in config.items() if value}}
    special = {}
    for name in SPECIAL:
        value = known.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
    try:
        source = content_of(template).decode()
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise GpuWorkerError(f"{template!r:.200} is no chat template: {error}") from None
    return source if isinstance(source, str) else None, special


def _json(file: str) -> dict[str, Any]:
    try:
        found = json.loads(content_of(file))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise GpuWorkerError(f"{file!r:.200} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


@lru_cache(8)
def _compile(source: str) -> tuple[Any, type[Exception]]:
    """-> (a template, what it raises)."""
    try:
        jinja2: Any = importlib.import_module("jinja2")
        sandbox: Any = importlib.import_module("jinja2.sandbox")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "messages become a prompt by the model's chat template, with the package jinja2: pip install jinja2", name=error.name
        ) from None
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < _LEAST_JINJA:
        raise ImportError(f"jinja2 {jinja2.__version__} is too old to run chat templates safely: pip install 'jinja2>=3.1.6'")

    extension: Any = importlib.import_module("jinja2.ext")

    class Generation(extension.Extension):  # type: ignore[misc]
        """{% generation %}: marks what training looks at, and changes nothing here."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
        """Without names of Python's own."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: Any, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")

    class Dict:
        """`dict` without what a class has."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now, dict=Dict(), namespace=Namespace)
    try:
        return environment.from_string(source), jinja2.exceptions.TemplateError
    except jinja2.exceptions.TemplateError as error:
        raise GpuWorkerError(f"the model's chat template cannot be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
