"""The files of deploy/, as far as they can be checked here: systemd's own verdict on the unit, and what compose.yaml and kubernetes.yaml say, done with
namespaces: two containers, two pid namespaces, two users, one memory-backed volume."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import gpuworker
from gpuworker.cli import main
from gpuworker.config import load_config
from tests.pod import GROUP, WEB, WORKER, container

DEPLOY = pathlib.Path(__file__).parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes.yaml"


@pytest.fixture
def pod():
    """-> the pod's spec, its worker and its web container."""
    spec = next(document for document in yaml.safe_load_all(KUBERNETES.read_text()) if document["kind"] == "Deployment")["spec"]["template"]["spec"]
    return spec, spec["initContainers"][0], spec["containers"][0]


def test_the_pod_shares_memory_between_two_users_of_one_group(pod):
    spec, worker, web = pod
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"]["medium"] == "Memory"
    for each in (worker, web):
        assert {"name": "shm", "mountPath": "/dev/shm"} in each["volumeMounts"]
    assert (worker["securityContext"]["runAsUser"], web["securityContext"]["runAsUser"]) == (WORKER, WEB)
    assert spec["securityContext"]["fsGroup"] == GROUP
    assert not spec.get("shareProcessNamespace")
    assert "nvidia.com/gpu" in worker["resources"]["limits"]
    assert "nvidia.com/gpu" not in web["resources"]["limits"]
    assert worker["restartPolicy"] == "Always", "which is what makes an init container a sidecar"
    assert spec["enableServiceLinks"] is False


def test_the_probes_of_the_pod_are_commands_that_there_are(pod, name, capsys):
    _, worker, _ = pod
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *args = worker[probe]["exec"]["command"]
        assert program == "gpuworker"
        assert main([name if arg == "embed" else arg for arg in args]) == 1
        assert f"no worker named {name!r}" in capsys.readouterr().err
    started_within_s = worker["startupProbe"]["periodSeconds"] * worker["startupProbe"]["failureThreshold"]
    assert started_within_s >= gpuworker.WorkerOptions().startup_timeout_s
    assert pod[0]["terminationGracePeriodSeconds"] > gpuworker.WorkerOptions().drain_timeout_s


def test_the_configuration_in_the_pod_and_in_the_image_is_right(pod, tmp_path):
    (config,) = (document for document in yaml.safe_load_all(KUBERNETES.read_text()) if document["kind"] == "ConfigMap")
    in_pod = tmp_path / "gpuworker.toml"
    in_pod.write_text(config["data"]["gpuworker.toml"])
    for path in (in_pod, DEPLOY / "example" / "gpuworker.toml"):
        assert main(["config", "check", str(path)]) == 0
        loaded = load_config(path, "embed")
        assert loaded.options["group"] == str(GROUP)
        limit_bytes = 256 << 20
        assert gpuworker.WorkerOptions.of(loaded.options).geometry.segment_bytes < limit_bytes / 4


def test_compose_shares_a_volume_and_no_namespace():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    worker, web = compose["services"]["worker"], compose["services"]["web"]
    assert [service["user"] for service in (worker, web)] == [f"{WORKER}:{WORKER}", f"{WEB}:{WEB}"]
    for service in (worker, web):
        assert service["volumes"] == ["shm:/dev/shm"]
        assert service["group_add"] == [str(GROUP)]
        assert not {"ipc", "pid", "privileged"} & service.keys()
        assert (DEPLOY.parent / "deploy" / service["build"]["context"]).resolve() == DEPLOY.parent
    assert worker["healthcheck"]["test"] == ["CMD", "gpuworker", "health", "embed"]
    assert web["depends_on"]["worker"]["condition"] == "service_healthy"
    options = dict(part.split("=") for part in compose["volumes"]["shm"]["driver_opts"]["o"].split(","))
    assert options == {"size": str(256 << 20), "mode": "3770", "gid": str(GROUP)}


def test_the_image_has_these_users_and_that_group():
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"--[gu]id (\d+)", text) == [str(GROUP), str(WORKER), str(WEB)]
    for source in re.findall(r"^COPY (deploy/\S+) (deploy/\S+)? ?/app/$", text, re.MULTILINE):
        for file in filter(None, source):
            assert (DEPLOY.parent / file).is_file(), file


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "gpuworker@.service").read_text()
    assert text.count("/opt/gpuworker/bin/gpuworker") == 2
    unit = tmp_path / "gpuworker@.service"
    unit.write_text(text.replace("/opt/gpuworker/bin/gpuworker", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_speaks_of_commands_and_limits_that_there_are():
    text = (DEPLOY / "gpuworker@.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert (settings["Type"], settings["NotifyAccess"], settings["KillMode"]) == ("notify", "main", "mixed")
    assert "DynamicUser" not in settings, "it would remove the segment when the unit stops"
    assert int(settings["TimeoutStopSec"]) > gpuworker.WorkerOptions().drain_timeout_s + 5
    from gpuworker.cli import build_parser

    for key in ("ExecStart", "ExecReload"):
        build_parser().parse_args([word.replace("%i", "embed") for word in settings[key].split()[1:]])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make such containers")
@pytest.mark.parametrize("mode", ["2777", "3770"], ids=["as emptyDir with fsGroup", "as the volume of compose"])
def test_two_containers_two_pid_namespaces_two_users_one_volume(mode):
    """From end to end what the files describe (tests/pod.py). The pod is a mount namespace with a tmpfs of its own at /dev/shm."""
    refused = subprocess.run(["unshare", "--mount", *container(WORKER), "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"needs the right to make namespaces: {refused.stderr.strip()}")
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--mount-proc",
        "--fork",
        "--kill-child",
        sys.executable,
        pathlib.Path(__file__).with_name("pod.py"),
        DEPLOY / "example",
        mode,
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for turn in ("before", "after"):
        pid, user, is_right, answer, health = said[turn]
        assert (pid, user, is_right) == (1, WEB, True)
        assert answer == ["200", "HELLO"]
        assert (health[0], health[1]["status"]) == ("200", "ok")
    assert said["health"] == [0, 1], "the probe is for the worker's own container"
    assert ["gpuworker-embed", WORKER, GROUP, "0o100660"] in [file[:4] for file in said["files"]]
    assert (said["web"], said["worker"]) == (0, 0)
    assert [file for file in said["left"] if file[4]] == []
