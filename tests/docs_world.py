"""What the blocks of a page run against: a folder, a namespace, and the workers that they call. Names of workers are made this run's own."""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys

import numpy as np

import gpuworker
from gpuworker.cli import build_parser, main
from tests.conftest import eventually
from tests.fake_generation import BYTES, TEMPLATE, echo, fake_owner, served

_CALLED = re.compile(r'((?:connect(?:_async)?|AsyncClient|make_app|Stats\.of|snapshot|render|load_config)\(\s*(?:"[\w.]+toml", )?\[?)"(\w+)"')
_STARTED = re.compile(r'((?:Worker|serve)\([^\n]*name=)"(\w+)"')
_QUICK = ("list", "stats", "health", "metrics", "top", "config", "simulate")  # commands that are run; others are only parsed
_ENDLESS = {"--watch", "--listen"}


class World:
    """One page's. Use as a context: what it has started ends with it."""

    def __init__(self, page, blocks, folder, monkeypatch):
        self.page, self.blocks, self.folder, self.patch = page, blocks, folder, monkeypatch
        self.names, self.stack = {}, contextlib.ExitStack()
        self.namespace = {"__name__": "page", "gpuworker": gpuworker, "asyncio": asyncio, "np": np}
        self.namespace |= {"texts": ["some text", "another"], "small_cpu_model": len}  # what a reader has already
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        self._process = gpuworker.Worker

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.stack.close()
        for module in ("model", "client", "app"):
            sys.modules.pop(module, None)

    # Workers.

    def own(self, name):
        """A worker of this name is there from now on, where we know what it should be. -> its name in this run."""
        if name not in self.names:
            self.names[name] = f"t-{os.getpid()}-{os.urandom(3).hex()}-{name}"
            start = {"embed": self._embed, "llm": self._llm}.get(name)
            if start is not None:
                start(self.names[name])
        return self.names[name]

    def _embed(self, name):
        if self.page.name == "encoders.md":
            from gpuworker.execution.encoder import HFEncoder

            handler = HFEncoder(self._encoder())
        elif (self.folder / "model.py").exists():
            handler = "model:Embedder"
        else:
            handler = lambda texts: [np.ones(4, np.float32) for _ in texts]  # noqa: E731
        self.stack.enter_context(self._process(handler, name=name, in_process=True))

    def _llm(self, name):
        model = self.folder / "llm"
        model.mkdir()
        BYTES.save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE}))
        self.stack.enter_context(served(self.stack.enter_context(fake_owner(name, model)), echo))

    def _encoder(self):
        from tests.tiny_encoder import save_encoder

        directory = self.folder / "encoder"
        if not directory.exists():
            directory.mkdir()
            save_encoder(directory)
        return directory

    def serve(self, command):
        """Starts `gpuworker serve ...` as it stands on the page, but for the name."""
        arguments = command.split()[1:]
        at = arguments.index("--name") + 1
        name = self.names[arguments[at]] = f"t-{os.getpid()}-{os.urandom(3).hex()}-{arguments[at]}"
        arguments[at] = name
        process = subprocess.Popen([sys.executable, "-m", "gpuworker.cli", *arguments], cwd=self.folder, stderr=subprocess.PIPE, text=True)

        def stop():
            process.terminate()
            assert process.wait(60) == 0, process.stderr.read()
            process.stderr.close()

        self.stack.callback(stop)
        eventually(lambda: process.poll() is not None or main(["health", name]) == 0, 60)
        assert process.poll() is None, process.stderr.read()

    # Blocks.

    def python(self, block):
        text = self._renamed(block.text)
        if block.file:
            (self.folder / block.file).write_text(text)
            sys.modules.pop(block.file.removesuffix(".py"), None)
            if any(f"python {block.file}" in other.text for other in self.blocks if other.language == "console"):
                return
        if "__main__" in text:
            script = self.folder / f"script_{block.line}.py"
            script.write_text(text)
            self.program(script.name)
            return
        code = compile("\n" * (block.line - 1) + text, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with self.patch.context() as patch:
            patch.setattr(gpuworker, "Worker", self._in_process, raising=False)
            result = eval(code, self.namespace)
            if inspect.iscoroutine(result):
                asyncio.run(result)

    def _in_process(self, handler, **options):
        return self._process(handler, in_process=True, **options)

    def _renamed(self, text):
        def called(match):
            return f'{match[1]}"{match[2] if "load_config" in match[1] else self.own(match[2])}"'

        text = _STARTED.sub(lambda match: f'{match[1]}"t-{os.getpid()}-{os.urandom(3).hex()}-{match[2]}"', _CALLED.sub(called, text))
        text = re.sub(r'"/models/all-MiniLM[^"]*"', lambda _: repr(str(self._encoder())), text)
        return text.replace('"/etc/keys"', repr(str(self._keys())))

    def _keys(self):
        file = self.folder / "keys"
        file.write_text("a-key\n")
        file.chmod(0o600)
        return file

    def program(self, file):
        """-> what it prints."""
        done = subprocess.run([sys.executable, file], cwd=self.folder, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def command(self, command, output, capsys):
        """A command of gpuworker: its own parser has to know it; the quick ones are run, end well, and print what the page says."""
        variables, words = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)gpuworker ?(.*)", command).groups()
        arguments = [part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", words)]
        build_parser().parse_args([argument if argument != "NAME" else "embed" for argument in arguments])
        kind = arguments[0]
        if kind not in _QUICK or _ENDLESS & set(arguments) or (kind == "top" and "--once" not in arguments):
            return
        if kind != "config":  # there a name is a table of the file
            arguments = [
                self.own("embed" if argument == "NAME" else argument) if argument in ("embed", "llm", "NAME") else argument for argument in arguments
            ]
        if kind == "simulate" and not output:
            arguments += ["--requests", "200"]
        with self.patch.context() as patch:
            for variable in variables.split():
                patch.setenv(*variable.split("=", 1))
            capsys.readouterr()
            code, (printed, errors) = main(arguments), capsys.readouterr()
            assert code == 0, errors
            assert "\n".join(output) in printed
