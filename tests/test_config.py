"""Settings from a file, the environment and arguments: one rule, and every mistake named where it was made."""

import json
import pathlib
import pickle
import re

import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.cli.text import setting
from gpuworker.config import file, layers
from gpuworker.config.keys import KEYS, Setting
from gpuworker.config.settings import settings
from gpuworker.execution.model_directory import DECODER, ENCODER, Recipe

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "configuration.md"
GOOD = """
[workers.embed]
handler = "model:Embedder"
max_batch_size = 64
max_wait_ms = 2
length_buckets = [16, 32]
"standby" = true

[workers.llm]
hf = "/models/llm"
dtype = "float16"
"""


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for key in KEYS:
        monkeypatch.delenv(layers.PREFIX + key.upper(), raising=False)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "gpuworker.toml"
        path.write_text(text)
        return str(path)

    return write


MISTAKES = [
    ("workers = 3", "gpuworker.toml: no worker; begin one with [workers.NAME]"),
    ("", "no worker; begin one with [workers.NAME]"),
    ("[workers.a]\nx = = 1", "gpuworker.toml:2: Invalid value"),
    ("x = ", "gpuworker.toml: Invalid value (at end of document)"),
    ("capacity = 3\n[workers.a]\nhandler = 'm:f'", "toml:1: unknown key 'capacity'; an option belongs under [workers.NAME]"),
    ("[worker.a]\nhandler = 'm:f'", "unknown key 'worker'; did you mean 'workers'?"),
    ("[workers]\nmax_batch_sise = 3", "workers.max_batch_sise is no table: begin it with [workers.max_batch_sise]; 'max_batch_size' belongs under"),
    ("[workers.'a/b']\nhandler = 'm:f'", "toml:1: worker name 'a/b': use 1 to 100 letters"),
    ("[workers.a]\nhandler = 'm:f'\nmax_batchsize = 3", "toml:3: unknown key 'max_batchsize' of worker 'a'; did you mean 'max_batch_size'?"),
    ("[workers.a]\nhandler = 'm:f'\nzzz = 3", "toml:3: unknown key 'zzz' of worker 'a'\n"),
    ("[workers.a]\nhandler = 'm:f'\ncapacity = '3'", "toml:3: capacity='3': give an integer"),
    ("[workers.a]\nhandler = 'm:f'\ncapacity = true", "toml:3: capacity=True: give an integer"),
    ("[workers.a]\nhandler = 'm:f'\nstandby = 1", "toml:3: standby=1: give true or false"),
    ("[workers.a]\nhandler = 'm:f'\nmax_wait_ms = '2'", "toml:3: max_wait_ms='2': give a number"),
    ("[workers.a]\nhandler = 'm:f'\nwake = 1", "toml:3: wake=1: give a string"),
    ("[workers.a]\nhandler = 'm:f'\nlength_buckets = ['a']", "toml:3: length_buckets=['a']: give a list of integers or \"learn\""),
    ("[workers.a]\nhandler = 'm:f'\ncapacity = 0", "toml:3: capacity=0: give an integer from 1"),
    ("[workers.a]\nhandler = 'm:f'\nlate = 'serve'", "toml:3: late='serve': it says what happens under a latency_budget_ms"),
    ("[workers.a]\nhandler = 'm:f'\nlength_buckets = [32, 16]", "toml:3: length_buckets=(32, 16): give 1 to"),
    ("[workers.a]\nhandler = 'm:f'\nhf = 'd'", "worker 'a': give handler ("),
    ("[workers.a]\nhandler = 'm:f'\ndtype = 'float16'", "toml:3: dtype is for --hf-encoder"),
    ("[workers.a]\nhf = 'd'\ndtype = 'int4'", "toml:3: dtype='int4': choose one of 'float32'"),
    ("[workers.a]\nhf = 'd'\nkv_cache_bytes = 0", "toml:3: kv_cache_bytes 0: give at least 1"),
    ("[workers.a]\ncapacity = 3", "worker 'a': nothing to serve: set handler, hf_encoder, hf or gguf"),
    ("[workers.a]\nhandler = 'm:f'\n[workers.b]\nhandler = 'm:f'\ncapacity = 0", "toml:5: capacity=0"),
    ("workers.a = {handler = 'm:f', capacity = 0}", "gpuworker.toml: capacity=0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_line(written, capsys, text, message):
    assert main(["config", "check", written(text)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[workers.a]\nhandler = 'm\xe9:f'", "it is not UTF-8"),
        (b"[workers.a]\ncapacity = " + b"[" * 5000 + b"]" * 5000, "too deep within each other"),
        (b"[workers.a]\ncapacity = " + b"9" * 5000, "4300 digits"),
        (b"#" * (1 << 20) + b"\n", "larger than 1,048,576 bytes"),
    ],
    ids=("latin-1", "deep", "digits", "huge"),
)
def test_a_file_that_no_reader_of_toml_can_take_is_one_line(tmp_path, capsys, raw, message):
    (tmp_path / "w.toml").write_bytes(raw)
    assert main(["config", "check", str(tmp_path / "w.toml")]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    with pytest.raises(gpuworker.ConfigError):
        gpuworker.load_config(tmp_path / "w.toml")


def test_a_path_that_can_be_none_and_a_file_without_end(capsys):
    with pytest.raises(gpuworker.ConfigError, match="null byte"):
        gpuworker.load_config("a\0b")
    assert main(["config", "check", "/dev/zero"]) == 1
    assert "not a file of settings" in capsys.readouterr().err


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbf[workers.a]\r\nhandler = 'm:f'\r\n")
    assert gpuworker.load_config(tmp_path / "w.toml").handler == "m:f"


def test_a_name_on_the_command_line_that_is_none_is_one_line(written, capsys):
    assert main(["serve", "--config", written(GOOD), "not a name"]) == 1
    assert "no worker 'not a name' in there, but embed, llm" in capsys.readouterr().err


def test_all_mistakes_are_named_at_once(written, capsys):
    path = written("[workers.a]\nhandlr = 'm:f'\ncapacity = '3'\n[workers.b]\nlat = 'serve'\n")
    assert main(["config", "check", path]) == 1
    assert [line.partition(".toml:")[2][0] for line in capsys.readouterr().err.splitlines()] == ["2", "3", "5"]


def test_a_good_file(written, capsys):
    assert main(["config", "check", written(GOOD)]) == 0
    assert capsys.readouterr().out.endswith("gpuworker.toml: 2 workers: embed, llm\n")
    assert main(["config", "check", written(GOOD) + "x"]) == 1
    assert "No such file" in capsys.readouterr().err


FILE, ENVIRONMENT, FLAG = {"wake": Setting("park", "f:1")}, {"GPUWORKER_WAKE": "busy"}, {"wake": Setting("adaptive", "--wake")}


@pytest.mark.parametrize(
    ("table", "environ", "flags", "value", "origin"),
    [
        (FILE, ENVIRONMENT, FLAG, "adaptive", "--wake"),
        (FILE, ENVIRONMENT, {}, "busy", "GPUWORKER_WAKE"),
        (FILE, {}, FLAG, "adaptive", "--wake"),
        (FILE, {}, {}, "park", "f:1"),
        (FILE, {"GPUWORKER_WAKE": ""}, {}, "park", "f:1"),
        ({}, ENVIRONMENT, {}, "busy", "GPUWORKER_WAKE"),
    ],
)
def test_the_nearest_layer_wins(table, environ, flags, value, origin):
    assert layers.layered(table, layers.environment(environ), flags)["wake"] == (value, origin)


def test_what_is_served_is_one_setting():
    found = layers.layered({"hf": Setting("d", "f:1"), "dtype": Setting("float16", "f:2")}, {"handler": Setting("m:f", "GPUWORKER_HANDLER")})
    assert {key: value.value for key, value in found.items()} == {"handler": "m:f", "dtype": "float16"}


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("MAX_BATCH_SIZE", "7", 7), ("MAX_WAIT_MS", "1.5", 1.5), ("STANDBY", "Yes", True), ("ISOLATE_ERRORS", "0", False), ("WAKE", "busy", "busy"),
        ("ALLOWED_BATCH_SIZES", "1,2,4", "1,2,4"), ("HANDLER", "m:f", "m:f"), ("KV_CACHE_BYTES", "100", 100),
    ],
)  # fmt: skip
def test_a_variable_for_every_kind_of_setting(variable, text, value):
    found = layers.environment({"GPUWORKER_" + variable: text})[variable.lower()]
    assert (found.value, type(found.value), found.origin) == (value, type(value), "GPUWORKER_" + variable)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("GPUWORKER_MAX_BATCHSIZE", "3", "did you mean GPUWORKER_MAX_BATCH_SIZE?"),
        ("GPUWORKER_CAPACITY", "many", "GPUWORKER_CAPACITY='many': give an integer"),
        ("GPUWORKER_STANDBY", "maybe", "GPUWORKER_STANDBY='maybe': give true or false"),
        ("GPUWORKER_MAX_WAIT_MS", "2ms", "GPUWORKER_MAX_WAIT_MS='2ms': give a number"),
    ],
)
def test_a_variable_that_is_wrong(variable, text, message):
    with pytest.raises(gpuworker.ConfigError, match=re.escape(message)):
        layers.environment({variable: text})


def test_variables_of_others_are_let_be():
    """Kubernetes sets such ones in every container, where there is a service called gpuworker."""
    others = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR", "EMBED_SERVICE_HOST", "LOG", "CONFIG", "NAME")
    assert layers.environment({f"GPUWORKER_{other}": "x" for other in others} | {"PATH": "x"}) == {}


def test_an_option_out_of_range_is_blamed_on_where_it_was_set(written):
    with pytest.raises(gpuworker.ConfigError, match=r"^GPUWORKER_CAPACITY: capacity=0: give"):
        settings(written(GOOD), "embed", {}, {"GPUWORKER_CAPACITY": "0"}).checked()


def test_which_worker(written, monkeypatch):
    path = written(GOOD)
    with pytest.raises(gpuworker.ConfigError, match="has 2 workers: say which, embed, llm"):
        gpuworker.load_config(path)
    with pytest.raises(gpuworker.ConfigError, match=r"no worker 'embd' in there; did you mean 'embed'\?"):
        gpuworker.load_config(path, "embd")
    with pytest.raises(gpuworker.ConfigError, match="no name"):
        gpuworker.load_config()
    with pytest.raises(gpuworker.ConfigError, match="worker name 'a/b': use 1 to 100"):
        gpuworker.load_config(None, "a/b", handler="m:f")
    monkeypatch.setenv("GPUWORKER_CONFIG", path)
    monkeypatch.setenv("GPUWORKER_NAME", "embed")
    assert gpuworker.load_config().name == "embed"
    assert gpuworker.load_config(written("[workers.only]\nhandler = 'm:f'"), "only").name == "only"
    monkeypatch.delenv("GPUWORKER_NAME")
    assert gpuworker.load_config().name == "only"


def test_load_config_gives_what_a_worker_is_started_with(written, name):
    path = written(f"[workers.{name}]\nhandler = 'tests.handlers:double'\nmax_wait_ms = 2\ncapacity = 16\nmax_response_bytes = 4096\n")
    config = gpuworker.load_config(path, capacity=8, max_request_bytes=4096)
    assert config.options == {"max_wait_ms": 2, "capacity": 8, "max_response_bytes": 4096, "max_request_bytes": 4096}
    assert (config.origins["max_wait_ms"], config.origins["capacity"]) == (f"{path}:3", "argument")
    with gpuworker.Worker(config.handler, name=config.name, in_process=True, **config.options) as worker:
        assert worker.connect().submit(21) == 42
    with pytest.raises(TypeError, match=r"unknown setting 'capacty'; did you mean 'capacity'\?"):
        gpuworker.load_config(path, capacty=8)


def test_a_sidecar_takes_a_config(written):
    from gpuworker.frontends.gunicorn import sidecar

    config = gpuworker.load_config(written("[workers.a]\nhandler = 'm:f'\ncapacity = 8\n"))
    hooks = sidecar(config)
    assert callable(hooks.on_starting)
    for wrong in ({"name": "b"}, {"capacity": 3}):
        with pytest.raises(TypeError, match="give others to load_config"):
            sidecar(config, **wrong)
    with pytest.raises(TypeError, match="what clients connect to"):
        sidecar("m:f")


def test_a_model_that_is_configured_as_before_is_the_same_to_a_sidecar():
    """gunicorn executes its configuration again at HUP; what has changed in it is then logged."""
    recipe = Recipe(DECODER, "d", {"dtype": None})
    assert recipe == Recipe(DECODER, "d", {"dtype": None})
    assert len({recipe, Recipe(DECODER, "d", {"dtype": None}), Recipe(DECODER, "e", {})}) == 2
    assert recipe != Recipe(DECODER, "d", {"dtype": "float16"})
    assert recipe != Recipe(ENCODER, "d", {"dtype": None})


def test_show_names_the_origin_of_every_option(written, capsys, monkeypatch):
    path = written(GOOD)
    monkeypatch.setenv("GPUWORKER_CONFIG", path)
    monkeypatch.setenv("GPUWORKER_WAKE", "busy")
    assert main(["config", "show", "embed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    assert gpuworker.WorkerOptions.__dataclass_fields__.keys() <= shown.keys()
    assert [shown[key] for key in ("max_batch_size", "wake", "late")] == [
        {"value": 64, "origin": f"{path}:4"}, {"value": "busy", "origin": "GPUWORKER_WAKE"}, {"value": "reject", "origin": "default"},
    ]  # fmt: skip
    assert main(["config", "show", "embed"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"length_buckets +\[16, 32\] +\S+:6\n", text)
    assert re.search(r"max_length +- +default\n", text)
    monkeypatch.delenv("GPUWORKER_CONFIG")
    assert main(["config", "show"]) == 1
    assert "which file?" in capsys.readouterr().err


@pytest.fixture
def jobs(monkeypatch):
    """What `gpuworker serve` would run."""
    made = []
    monkeypatch.setattr("gpuworker.cli.serve.Supervisor", lambda job, *_: made.append(job) or type("Done", (), {"run": lambda self: 0})())
    monkeypatch.setenv("GPUWORKER_LOG", "WARNING")
    return made


@pytest.mark.parametrize(
    ("args", "handler", "size"),
    [
        (["embed"], "model:Embedder", 64),
        (["--name", "embed", "--max-batch-size", "3"], "model:Embedder", 3),
        (["other:f", "--name", "embed"], "other:f", 64),
        (["embed", "--name", "embed"], "model:Embedder", 64),
    ],
)
def test_serve_by_file(written, jobs, args, handler, size):
    assert main(["serve", "--config", written(GOOD), *args]) == 0
    assert (jobs[0].name, pickle.loads(jobs[0].handler), jobs[0].options["max_batch_size"]) == ("embed", handler, size)


def test_serve_by_the_environment_alone(jobs, monkeypatch):
    for variable, value in {"NAME": "n", "HANDLER": "m:f", "MAX_BATCH_SIZE": "5"}.items():
        monkeypatch.setenv(f"GPUWORKER_{variable}", value)
    assert main(["serve"]) == 0
    assert (jobs[0].name, jobs[0].options) == ("n", {"max_batch_size": 5})


def test_serve_with_contradictory_names(written, jobs, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--config", written(GOOD), "embed", "--name", "llm"])
    assert "not both" in capsys.readouterr().err


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(gpuworker.ConfigError(["a", "b"])))
    assert (error.problems, str(error)) == (["a", "b"], "a\nb")


def test_lines_are_found_only_where_they_are_certain():
    text = "[workers.a]\nx = [\n  [1],\n]\nkey = 1\nkey = 2\n[workers.b]\nkey = 3 # [workers.a]\n"
    assert [file.place("f", text, *at) for at in (("a", "x"), ("a", "key"), ("b", "key"), ("b", "none"), ("c", "key"))] == [
        "f:2",
        "f:1",
        "f:8",
        "f:7",
        "f",
    ]


def test_the_table_in_the_docs_has_every_setting():
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]*)`? \|", DOCS.read_text(), re.MULTILINE)
    assert [key for key, _ in rows] == list(KEYS)
    for option, field in gpuworker.WorkerOptions.__dataclass_fields__.items():
        assert dict(rows)[option].strip() == setting(field.default), option
