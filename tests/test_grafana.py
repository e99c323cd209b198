"""The dashboard asks only for what is exported, and sensibly."""

import json
import pathlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import Gate
from .exposed import text_of, with_everything

FILE = pathlib.Path(__file__).parent.parent / "frontends" / "grafana.json"
DASHBOARD = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
SELECTED = re.compile(r"(\w+)\{([^}]*)\}(\[\$__rate_interval\])?")


@pytest.fixture
def exported(in_process):
    """{name of a sample: (type of its family, its labels)} of a worker that has everything."""
    text = text_of(with_everything(in_process(Gate()))).decode()
    return {s.name: (family.type, s.labels) for family in text_string_to_metric_families(text) for s in family.samples}


def test_every_query_is_of_a_metric_and_of_labels_that_are_exported(exported):
    assert len(QUERIES) > 50
    for title, expr, _ in QUERIES:
        selected = SELECTED.findall(expr)
        assert selected, title
        assert sorted(re.findall(r"gpuworker_\w+", expr)) == sorted(name for name, _, _ in selected), f"{title}: a metric of all workers"
        for name, selector, span in selected:
            assert name in exported, f"{title}: {name}"
            kind, labels = exported[name]
            matchers = dict(re.fullmatch(r'(\w+)=~?"([^"]*)"', part).groups() for part in selector.split(","))
            assert matchers.pop("worker") == "$worker"
            assert matchers.keys() <= labels.keys()
            assert bool(span) == (kind != "gauge"), f"{title}: rates are of what only grows, and that is of interest by its rate alone"
        for grouped in re.findall(r"by \(([^)]*)\)", expr):
            assert set(grouped.split(", ")) <= set(exported[selected[0][0]][1]), title


def test_values_of_labels_that_are_asked_for_are_exported(in_process):
    text = text_of(with_everything(in_process(Gate()))).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    asked = [
        (name, *match)
        for _, expr, _ in QUERIES
        for name, selector, _ in SELECTED.findall(expr)
        for match in re.findall(r'(\w+)=~?"([^"$]+)"', selector)
    ]
    assert asked
    for name, label, values in asked:
        for value in values.split("|"):
            assert any(s.name == name and s.labels[label] == value for s in samples), (name, value)


def test_quantiles_are_of_buckets(exported):
    found = [expr for _, expr, _ in QUERIES if "histogram_quantile" in expr]
    assert found
    for expr in found:
        assert re.fullmatch(
            r"histogram_quantile\(0\.\d+, sum by \(worker, le\) \(rate\(gpuworker_\w+_bucket\{[^}]*\}\[\$__rate_interval\]\)\)\)", expr
        ), expr


def test_legends_show_labels_that_the_result_has(exported):
    for title, expr, legend in QUERIES:
        grouped = re.findall(r"by \(([^)]*)\)", expr)
        kept = set(grouped[0].split(", ")) - ({"le"} if "histogram_quantile" in expr else set()) if grouped else {"worker"}
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert "worker" in shown <= kept, title
        assert len([other for other in QUERIES if other[0] == title and other[2] == legend]) == 1, f"{title}: two lines of one name"


def test_workers_can_be_chosen_and_every_kind_of_thing_has_its_row():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["worker"]["definition"] == variables["worker"]["query"]["query"] == "label_values(gpuworker_up, worker)"
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Batches", "Scheduling", "Backpressure", "Generation", "Device"]
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
