"""gunicorn's sidecar with its settings in a file of gpuworker's."""

import pathlib
import signal
import subprocess
import sys

from gpuworker.segment.stats import Stats
from tests.conftest import eventually

CONF = """
import gpuworker
from gpuworker.frontends.gunicorn import sidecar

workers, control_socket_disable = 1, True
on_starting, on_reload, on_exit = sidecar(gpuworker.load_config("gpuworker.toml"))
"""
APP = """
def app(environ, start_response):
    start_response("200 OK", [])
    return [b""]
"""


def test_a_sidecar_by_a_file(tmp_path, name):
    (tmp_path / "conf.py").write_text(CONF)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "model.py").write_text("def run_batch(requests):\n    return requests\n")
    config = tmp_path / "gpuworker.toml"
    config.write_text(f"[workers.{name}]\nhandler = 'model:run_batch'\ncapacity = 8\n")
    log = tmp_path / "log"
    command = [pathlib.Path(sys.executable).with_name("gunicorn"), "-c", "conf.py", "-b", "127.0.0.1:0", "app:app"]
    with open(log, "wb") as said, subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said) as gunicorn:
        try:
            eventually(lambda: "Listening at" in log.read_text() or gunicorn.poll() is not None, 60)
            stats = Stats.of(name)
            assert (stats.capacity, stats.handler) == (8, "model:run_batch")
            gunicorn.send_signal(signal.SIGHUP)
            eventually(lambda: log.read_text().count("Booting worker") == 2)
            assert "needs a restart" not in log.read_text()
            config.write_text(config.read_text() + "max_batch_size = 2\n")
            gunicorn.send_signal(signal.SIGHUP)
            eventually(lambda: "needs a restart" in log.read_text())
            assert Stats.of(name).owner_pid == stats.owner_pid
        finally:
            gunicorn.terminate()
    assert gunicorn.returncode == 0
