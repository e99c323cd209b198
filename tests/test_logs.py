"""Logs as JSON: every line of stderr is one object, whoever wrote it."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.worker import logs
from gpuworker.worker.json_logs import JsonFormatter, JsonLines, running

pytest_plugins = ("tests.served_app",)


def command(*args, **options):
    """The command in a process of its own, to its end."""
    return subprocess.run([sys.executable, "-m", "gpuworker.cli", *args], capture_output=True, text=True, timeout=60, **options)


HANDLER = """
import logging, os, sys, threading, warnings

log = logging.getLogger("app.model")

def upper(requests):
    for request in requests:
        if request == b"log":
            log.warning("a slow one: %s", request, extra={"tokens": 7, "level": "mine"})
        elif request == b"print":
            print("by hand", file=sys.stderr, flush=True)
        elif request == b"warn":
            warnings.warn("old\\nways")
        elif request == b"thread":
            thread = threading.Thread(target=lambda: 1 / 0, name="helper")
            thread.start()
            thread.join()
        elif request == b"raise":
            raise ValueError("two\\nlines")
    return [request.upper() for request in requests]
"""


def test_every_line_of_a_worker_is_an_object(serve, app, name, monkeypatch):
    (app / "handlers.py").write_text(HANDLER)
    process = serve("--log-format", "json")
    assert json.loads(process.ready_line)["level"] == "INFO"
    with gpuworker.connect(name) as client:
        for request in (b"log", b"print", b"warn", b"thread"):
            assert client.submit(request) == request.upper()
        with pytest.raises(ValueError, match="two"):
            client.submit(b"raise")
        owner = gpuworker.Stats.of(name).owner_pid
        os.kill(owner, signal.SIGKILL)
        assert client.submit(b"again") == b"AGAIN"
    process.send_signal(signal.SIGTERM)
    lines = [json.loads(line) for line in process.communicate(timeout=60)[1].splitlines()]
    said = {line["message"]: line for line in lines}
    for line in lines:
        assert line["worker"] == name
        assert line["pid"] > 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
    slow = said["a slow one: b'log'"]
    assert (slow["logger"], slow["level"], slow["tokens"], slow["level_"], slow["pid"]) == ("app.model", "WARNING", 7, "mine", owner)
    assert re.fullmatch(r"\d+\.\d+", slow["requests"][0])
    assert (said["by hand"]["logger"], said["by hand"]["pid"]) == ("stderr", owner)
    assert "old\nways" in next(line["message"] for line in lines if line["logger"] == "py.warnings")
    assert said["helper ends in ZeroDivisionError"]["exception"]["type"] == "ZeroDivisionError"
    failed = next(line for line in lines if "failed on a batch of 1" in line["message"])
    assert failed["exception"]["message"] == "two\nlines"
    assert "in upper" in failed["exception"]["traceback"]
    assert failed["requests"] == [re.search(r"\(slot.generation: (.*)\)", failed["message"])[1]]
    died = next(line for line in lines if "SIGKILL" in line["message"])
    assert (died["logger"], died["pid"]) == ("gpuworker.supervisor", process.pid)
    assert said[f"worker {name} has stopped"]["level"] == "INFO"


def test_a_handler_that_cannot_be_loaded_is_one_line(app, name):
    done = command("serve", "handlers:Broken", "--name", name, cwd=app, env=os.environ | {logs.FORMAT: "json"})
    assert done.returncode == 1
    last = [json.loads(line) for line in done.stderr.splitlines()][-1]
    assert last["level"] == "CRITICAL"
    assert "weights are missing" in last["message"]
    assert "in load" in last["traceback"]


def test_a_form_that_is_none(app, name):
    done = command("serve", "handlers:Broken", "--name", name, cwd=app, env=os.environ | {logs.FORMAT: "xml"})
    assert done.returncode == 1
    assert "GPUWORKER_LOG_FORMAT=xml: it is text or json; logs are text" in done.stderr
    assert done.stderr.endswith("gpuworker: RuntimeError: weights are missing\n")
    with pytest.raises(SystemExit):
        main(["serve", "handlers:Broken", "--name", name, "--log-format", "xml"])


def record(message="said", *args, level=logging.INFO, exc_info=None, **extra):
    made = logging.LogRecord("some.logger", level, __file__, 1, message, args, exc_info)
    vars(made).update(extra)
    return made


def test_a_record():
    made = record("of %d", 5, tickets=[4096 + 3, 2 * 4096], shape=(1, 2))
    made.created = datetime(2024, 2, 29, 23, 59, 59, 5, tzinfo=timezone.utc).timestamp()
    assert json.loads(JsonFormatter().format(made)) == {
        "time": "2024-02-29T23:59:59.000005Z",
        "level": "INFO",
        "logger": "some.logger",
        "message": "of 5",
        "worker": "",
        "pid": os.getpid(),
        "requests": ["3.1", "0.2"],
        "shape": [1, 2],
    }


def test_whatever_a_record_is_given_it_is_one_line_of_json():
    cycle = []
    cycle.append(cycle)
    for odd in (float("nan"), float("inf"), cycle, {1: 2, (3,): 4}, object(), b"\xff", "\ud800", "line\nbreak\u2028", timedelta(1)):
        line = JsonFormatter().format(record("m\n%s", "x", odd=odd, message_id=1))
        assert len(line.splitlines()) == 1
        fields = json.loads(line, parse_constant=pytest.fail)
        assert (fields["message"], fields["message_id"]) == ("m\nx", 1)
        assert "odd" in fields


def test_an_exception_is_in_the_line():
    try:
        raise KeyError("x")
    except KeyError:
        line = JsonFormatter().format(record(exc_info=sys.exc_info()))
    assert len(line.splitlines()) == 1
    found = json.loads(line)["exception"]
    assert (found["type"], found["message"]) == ("KeyError", "'x'")
    assert found["traceback"].startswith("Traceback (most recent call last):\n")


def test_a_record_of_a_running_batch_names_its_requests_only_in_the_handlers_thread():
    running.begin([4096])
    try:
        assert json.loads(JsonFormatter().format(record()))["requests"] == ["0.1"]
        elsewhere = record()
        elsewhere.thread += 1
        assert "requests" not in json.loads(JsonFormatter().format(elsewhere))
    finally:
        running.end()
    assert "requests" not in json.loads(JsonFormatter().format(record()))


def test_what_others_write_becomes_objects_line_by_line():
    out = []
    lines = JsonLines(out.append, "w", 7)
    ours = JsonFormatter().format(record()).encode()
    whole = ours + b'\n{"time": broken\n\n  \nhalf \xff\xe2\x80\xa8 line'
    for at in range(0, len(whole), 5):
        lines.feed(whole[at : at + 5])
    assert [json.loads(line)["message"] for line in b"".join(out).splitlines()] == ["said", '{"time": broken']
    assert b"".join(out).startswith(ours + b"\n")
    lines.end()
    last = json.loads(out[-1])
    assert (last["message"], last["worker"], last["pid"], last["logger"]) == ("half \\xff\u2028 line", "w", 7, "stderr")
    lines.end()
    lines.feed(b"x" * (3 << 20))
    assert sum(len(json.loads(line)["message"]) for line in out[3:]) == 3 << 20


class _Unshowable(Exception):
    """Fails whenever somebody wants to see it."""

    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def _cycle():
    whole = []
    whole.append(whole)
    return whole


@pytest.mark.parametrize(
    ("args", "extra", "shown"),
    [
        (("%d of them", "x"), {}, {"message": "%d of them (its arguments cannot be filled in: TypeError: %d format: a real number is required, not str)"}),
        (("it is %s", _Unshowable()), {}, {"message": "it is %s (its arguments cannot be filled in: RuntimeError: no words)"}),
        ((_Unshowable(),), {}, {"message": "(cannot be shown: RuntimeError) (its arguments cannot be filled in: RuntimeError: no words)"}),
        (("m",), {"thing": _Unshowable()}, {"thing": "(cannot be shown: RuntimeError)"}),
        (("m",), {"n": 10**5000}, {"n": "(cannot be shown: ValueError)"}),
        (("m",), {"x": float("nan"), "d": {"a": [1]}}, {"x": "nan", "d": {"a": [1]}}),
        (("m",), {"c": _cycle(), "k": {(1, 2): 3}}, {"c": "[[...]]", "k": "{(1, 2): 3}"}),
        (("m",), {"tickets": "boo"}, {"tickets": "boo"}),
        (("two\nlines \u2028 \ud800",), {}, {"message": "two\nlines \u2028 \ud800"}),
    ],
)  # fmt: skip
def test_no_record_is_lost_or_takes_others_fields_along(args, extra, shown):
    record = logging.getLogger("app").makeRecord("app", logging.INFO, "f", 1, args[0], args[1:], None, extra=extra)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert {key: found[key] for key in shown} == shown
    assert "requests" not in found


def test_an_exception_that_cannot_be_shown_is_a_record():
    try:
        raise _Unshowable
    except _Unshowable:
        record = logging.getLogger("app").makeRecord("app", logging.ERROR, "f", 1, "m", (), sys.exc_info(), extra={"x": float("inf")})
    found = json.loads(JsonFormatter().format(record))
    assert found["exception"]["type"] == "_Unshowable"
    assert found["exception"]["message"] == "(cannot be shown: RuntimeError)"
    assert found["x"] == "inf"


@pytest.mark.parametrize(
    "line", [b'{"time": "x" no json}', b'{"time": "x", "a": ' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"time": "a"} {"time": "b"}']
)
def test_what_only_looks_like_a_line_of_ours_becomes_one(line):
    out = []
    JsonLines(out.append, "w", 1).feed(line + b"\n")
    found = json.loads(b"".join(out))
    assert (found["logger"], found["worker"], found["message"]) == ("stderr", "w", line.decode())


@pytest.mark.parametrize(
    ("level", "said"), [("nonsense", ["GPUWORKER_LOG=nonsense: it is one of DEBUG, INFO, WARNING, ERROR, CRITICAL; the level is INFO"]), ("", [])]
)
def test_a_level_that_is_none_is_told_and_does_no_harm(monkeypatch, caplog, level, said):
    ours = logging.getLogger("gpuworker")
    monkeypatch.setenv(logs.LEVEL, level)
    monkeypatch.setattr(ours, "level", ours.level)
    logs.set_up("INFO")
    assert ours.level == logging.INFO
    assert caplog.messages == said
