"""A pod, run as `unshare --mount --pid --mount-proc --fork python tests/pod.py FOLDER MODE`: a worker and a frontend in two pid namespaces, as two users of
one group, with a tmpfs of that mode at /dev/shm. What is served is in FOLDER, that is deploy/example. Prints what came of it as JSON; not a test by itself."""

import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

WORKER, WEB, GROUP = 10001, 10002, 12000
ROUND_TRIPS = 50


def container(user):
    """The command that begins one."""
    return ["unshare", "--pid", "--fork", "--mount-proc", "setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUP}", "--"]


def inside(user, *command, **options):
    return subprocess.Popen([*container(user), sys.executable, *command], text=True, **options)


def first_process(started):
    """Its pid as it is seen from outside."""
    return int(pathlib.Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()[0])


def serve(folder):
    """-> a container with a worker that is ready."""
    command = ("-m", "gpuworker.cli", "serve", "--config", "gpuworker.toml", "--name", "embed")
    started = inside(WORKER, *command, cwd=folder, stderr=subprocess.PIPE)
    said = []
    for line in started.stderr:
        said.append(line)
        if " ready" in line:
            return started
    sys.exit("".join(said) or "the worker has ended")


def health(user):
    """-> the probe's exit status."""
    return inside(user, "-m", "gpuworker.cli", "health", "embed", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()


def frontend():
    """In the web container: answers each line of stdin by one of what happened to its requests."""
    import gpuworker

    app = importlib.import_module("app").app

    def call(method, path, body=b""):
        said = []
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
        }
        reply = b"".join(app(environ, lambda status, headers: said.append(status)))
        return said[0].split()[0], json.loads(reply)

    large, small = "x" * 100_000, list(map(str, range(ROUND_TRIPS)))
    with gpuworker.connect("embed", group=str(GROUP), connect_timeout_s=60) as client:
        for _ in sys.stdin:
            is_right = [client.submit(text) for text in small] == small and client.submit(large) == large.upper()
            print(json.dumps([os.getpid(), os.getuid(), is_right, call("POST", "/", b'"hello"'), call("GET", "/healthz")]), flush=True)


def files():
    """What lies in the volume: name, user, group, mode, size."""
    found = [(name, os.stat(f"/dev/shm/{name}")) for name in os.listdir("/dev/shm")]
    return [(name, status.st_uid, status.st_gid, oct(status.st_mode), status.st_size) for name, status in found]


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


def reveal(paths):
    """What lies below a folder that is root's alone (its home, say) is there for every user of this mount namespace, and nothing else of that folder is."""
    hidden = {}
    for path in sorted(map(pathlib.Path, paths)):
        closed = [parent for parent in (path, *path.parents) if parent.is_dir() and not parent.stat().st_mode & 0o001]
        if closed and not any(path.is_relative_to(kept) for kept in hidden.get(closed[-1], ())):
            hidden.setdefault(closed[-1], []).append(path)
    with tempfile.TemporaryDirectory() as aside:
        for closed, kept in hidden.items():
            places = [pathlib.Path(tempfile.mkdtemp(dir=aside)) for _ in kept]
            for path, place in zip(kept, places, strict=True):
                mount("--bind", path, place)
            mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed)
            for path, place in zip(kept, places, strict=True):
                path.mkdir(parents=True, exist_ok=True)
                mount("--move", place, path)


def main(folder, mode):
    reveal({sys.base_prefix, sys.prefix, os.getcwd(), *(path for path in sys.path if os.path.isdir(path))})
    mount("-t", "tmpfs", "-o", f"size=64m,mode={mode},gid={GROUP}", "tmpfs", "/dev/shm")
    worker = serve(folder)
    web = inside(WEB, __file__, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder})

    def ask():
        web.stdin.write("go on\n")
        web.stdin.flush()
        return json.loads(web.stdout.readline())

    said = {"before": ask(), "health": [health(WORKER), health(WEB)], "files": files()}
    os.kill(first_process(worker), signal.SIGKILL)  # and with it the whole container, as the OOM killer may; another is started in its place
    worker.wait()
    worker = serve(folder)
    said["after"] = ask()
    web.stdin.close()
    said["web"] = web.wait()
    os.kill(first_process(worker), signal.SIGTERM)
    said["worker"], said["left"] = worker.wait(), files()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else frontend()
