"""Each recipe of docs/servers.md, as it is written there: one owner, whose batches span the server's processes, and no request lost while these are replaced.
And the applications in examples/."""

import json
import pathlib
import re
import shlex
import signal
import urllib.request

import pytest

import gpuworker
from tests.conftest import eventually, is_gone
from tests.web_load import Load

pytest_plugins = ("tests.web_server",)

ROOT = pathlib.Path(__file__).parent.parent
DOC = (ROOT / "docs" / "servers.md").read_text()
APPS = ROOT / "tests" / "server_apps"
COMMANDS = [line.removeprefix("$ ") for block in re.findall(r"```console\n(.*?)```", DOC, re.S) for line in block.splitlines()]
CONF = re.search(r"```python\n(# gunicorn.conf.py\n.*?)```", DOC, re.S)[1]
EXAMPLES = [ROOT / "examples" / f"{framework}_app.py" for framework in ("django", "flask", "fastapi")]
CALLERS = 4


def kind_of(command):
    """-> (server, its mode)"""
    words = shlex.split(command)
    words = words[words.index("--") + 1 :] if "--" in words else words
    return words[0], next((word for word in words if word in ("sync", "gthread", "gevent", "asgi", "wsgi")), "asgi")


def test_there_is_one_recipe_for_each_way_to_serve():
    gunicorns = [("gunicorn", kind) for kind in ("sync", "gthread", "gevent", "asgi")]
    assert [kind_of(command) for command in COMMANDS] == [*gunicorns, ("uvicorn", "asgi"), ("granian", "asgi"), ("granian", "wsgi")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(kind_of(command)))
def test_one_owner_whose_batches_span_processes_that_are_replaced_under_load(serving, command):
    kind, mode = kind_of(command)
    pytest.importorskip(kind)
    app = APPS / f"{mode if mode in ('asgi', 'gevent') else 'wsgi'}.py"
    server = serving(command, {"app.py": app.read_text(), "model.py": (APPS / "model.py").read_text(), "gunicorn.conf.py": CONF})
    with Load(server.port, CALLERS) as load:

        def until(condition):
            eventually(lambda: load.has_failed() or condition(), 60)

        def web_workers():
            return {pid for answer in load.answers for pid in answer["web_workers"]}

        def have_met():
            with server.owner_held():
                until(lambda: gpuworker.Stats.of(server.name).slots_in_use > 2)
            return any(len(set(answer["web_workers"])) > 1 for answer in load.answers)

        until(have_met)
        before = web_workers()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(web_workers() - before) >= 2)  # whom HUP has started
        if kind != "granian":  # it recycles by age only
            until(lambda: len(web_workers()) >= len(before) + 3)
    assert "hup" in server.log().lower()
    (owner,) = {answer["owner"] for answer in load.answers}
    assert owner == gpuworker.Stats.of(server.name).owner_pid
    print(f"{len(load.answers)} answers from {len(web_workers())} processes; connections cut: {len(load.cut)}, refused: {len(load.refused)}")
    if kind == "gunicorn":
        assert not load.cut
        assert not load.refused
    assert server.end() == 0
    assert is_gone(owner)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples(serving, example):
    text = example.read_text()
    assert text.count("\n") <= 25
    command = text.splitlines()[0].partition(". ")[2]
    path, data = re.search(r"curl -s localhost:8000(\S+) .*-d '(.*)'", text).groups()
    others = {f"examples/{other}.py": (ROOT / "examples" / f"{other}.py").read_text() for other in ("__init__", "lengths", "gunicorn_conf")}
    server = serving(command, {f"examples/{example.name}": text, **others}, "measure")
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response) == [len(text) for text in json.loads(data)]
    assert server.end() == 0
