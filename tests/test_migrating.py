"""docs/migrating.md speaks of options that there are."""

import inspect
import pathlib
import re

import gpuworker
from gpuworker.config.keys import KEYS

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "migrating.md"


def test_every_option_in_the_column_of_ours_exists():
    rows = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    ours = [word for row in rows if row[1] != "here" for word in re.findall(r"`([^`]+)`", row[1])]
    values = {"run_batch", '"serve"', "GPUWORKER_<OPTION>"}
    options = {word.partition(" ")[0] for word in ours if "(" not in word} - values
    assert options
    assert options <= KEYS.keys()
    calls = {word for word in ours if "(" in word} - {"warmup()", "load()", "length(request)", "run_batch(requests)", "list(client.map(inputs))"}
    assert calls == {"submit(timeout=...)", "submit(priority=...)", "client.enqueue(x)"}
    assert {"timeout", "priority"} <= inspect.signature(gpuworker.Client.submit).parameters.keys()
