"""The demo's texts: the first paragraph of each public docstring of the Python standard library, under its qualified name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

# Importing these opens a window or a browser, prints, writes files, pulls in tests, or gives another project's copy (setuptools' distutils).
SKIPPED = {"antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "test", "this", "turtledemo", "xxlimited", "xxlimited_35"}
SKIPPED |= {"encodings"}  # a hundred tables that all say the same

# Modules that a sample keeps whole: the answers to the demo's questions, and their rivals for the same questions.
KEPT_MODULES = ("argparse", "csv", "email", "fileinput", "getopt", "imaplib", "optparse", "poplib", "shlex", "smtplib", "tempfile")

SIGNATURE = re.compile(r"[\w.]+\(.*\)( *->.*)?")  # some C functions open their docstring with a bare signature
MIN_WORDS = 3


class Entry(NamedTuple):
    name: str  # "tempfile.mkdtemp"
    text: str  # one line


def load() -> list[Entry]:
    """Every distinct text, sorted by name: about 5,500, the same on every run of one Python. Takes a second or two."""
    entries: dict[str, Entry] = {}  # by text, so that what hundreds of classes repeat ("Return repr(self).") is there once
    for name, docstring in sorted(public_docstrings()):
        text = first_paragraph(docstring)
        if len(text.split()) >= MIN_WORDS:
            entries.setdefault(text, Entry(name, text))
    return list(entries.values())


def sample(entries: list[Entry], size: int) -> list[Entry]:
    """`size` entries in their order: those of KEPT_MODULES and, evenly spread, others."""
    kept = [entry.name.split(".")[0] in KEPT_MODULES for entry in entries]
    others = [index for index, keep in enumerate(kept) if not keep]
    wanted = min(max(0, size - sum(kept)), len(others))
    chosen = {others[step * len(others) // wanted] for step in range(wanted)}
    return [entry for index, entry in enumerate(entries) if kept[index] or index in chosen]


def first_paragraph(docstring: str) -> str:
    """The first paragraph that says something, as one line; "" where there is none."""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        text = " ".join(paragraph.split())
        if text and not SIGNATURE.fullmatch(text):
            return text
    return ""


def public_docstrings() -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of each public module, class, function and method; a thing reachable under two names comes twice."""
    for module in public_modules():
        yield from docstring_of(module.__name__, module)
        for name, member in public_members(module):
            qualified = f"{module.__name__}.{name}"
            yield from docstring_of(qualified, member)
            if inspect.isclass(member):
                for attribute, value in vars(member).items():
                    if not attribute.startswith("_"):
                        yield from docstring_of(f"{qualified}.{attribute}", value)


def docstring_of(name: str, thing: object) -> Iterator[tuple[str, str]]:
    # Only what defines its own docstring: an instance (a constant, an enum member) would show its class's.
    described = inspect.isroutine(thing) or isinstance(thing, (ModuleType, type, property, staticmethod, classmethod))
    docstring = getattr(thing, "__doc__", None)
    if described and isinstance(docstring, str):
        yield name, docstring


def public_members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """What `__all__` lists; without one, the public names defined in the module itself or in its C half (`_csv` of `csv`)."""
    homes = {module.__name__, f"_{module.__name__}"}
    for name in getattr(module, "__all__", None) or vars(module):
        member = getattr(module, name, None)
        if not name.startswith("_") and not inspect.ismodule(member) and (hasattr(module, "__all__") or getattr(member, "__module__", None) in homes):
            yield name, member


def public_modules() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules are deprecated, and say so when imported
        for name in sorted(sys.stdlib_module_names - SKIPPED):
            if not name.startswith("_"):
                yield from import_tree(name)


def import_tree(name: str) -> Iterator[ModuleType]:
    """The module and its public submodules, except those that this platform cannot import."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    yield module
    for _, child, _ in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not child.startswith("_") and child not in ("test", "tests"):
            yield from import_tree(f"{name}.{child}")
