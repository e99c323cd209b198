"""The picture at the top of README.md, from a result of `make bench-ipc`: python bench/ipc_picture.py bench/results/ipc-....json docs/images/comparison.svg

An SVG by hand and not by matplotlib, so that it can follow the reader's colour scheme; its background is its own, so that it can be read wherever it is shown.
"""

import html
import json
import sys
from pathlib import Path

from ipc.cells import FREE, LOAD_BYTES, SMALL_BYTES, Cell
from ipc.report import number
from ipc.statistics import Results

SHOWN = {  # contestant -> what readers call it, in no order
    "gpuworker-adaptive": "gpuworker",
    "gpuworker-park": 'gpuworker, wake="park"',
    "iceoryx2-polled": "iceoryx2, polled",
    "posix-mq": "posix_ipc message queue",
    "uds": "Unix socket",
    "pipe": "multiprocessing.Pipe",
    "faster-fifo": "faster-fifo",
    "queue": "multiprocessing.Queue",
    "pyzmq": "pyzmq",
    "gunicorn-dirty": "gunicorn dirty worker",
}
PANELS = (  # title, cell, metric, whether more is better
    ("Round trip, µs (median; 64 bytes, one client)", Cell(SMALL_BYTES, 1, FREE), "p50_us", False),
    ("Requests per second (4 KiB, 16 clients)", Cell(LOAD_BYTES, 16, FREE), "requests_per_s", True),
)
WIDTH, ROW, BAR, LABEL, FIGURE = 470, 27, 16, 186, 66  # px: of a panel, of a row, of a bar; room for names and for figures
TOP, FOOT, GAP, MARGIN = 62, 34, 36, 24
STYLE = """
  .ground { fill: #ffffff } text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
  .title { font-weight: 600 } .ours { fill: #c2374c } text.ours { font-weight: 600 } .other { fill: #9fb3c8 } .small { font-size: 11px; fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #161b22 } text { fill: #e6edf3 } .ours { fill: #ff7b8a } .other { fill: #4d6480 } .small { fill: #9aa4af }
  }
"""


def draw(found: dict) -> str:
    """-> the SVG's text."""
    records = [record | {"cell": Cell(**record["cell"])} for record in found["records"]]
    results = Results(records)
    rows = max(len(ordered(results, *panel[1:])) for panel in PANELS)
    width, height = 2 * WIDTH + GAP + 2 * MARGIN, TOP + rows * ROW + FOOT
    machine = found["machine"]
    kernel = machine["kernel"].split("-")[0]
    where = f"{machine['cpu']}, {machine['cores']} cores, Linux {kernel}, Python {machine['python']}; {found['rounds']} rounds. make bench-ipc"
    parts = [f'<rect class="ground" width="{width}" height="{height}" rx="8"/>']
    for at, panel in enumerate(PANELS):
        parts += bars(MARGIN + at * (WIDTH + GAP), panel[0], ordered(results, *panel[1:]))
    parts.append(text(MARGIN, height - 14, f"An identity handler, called from Python, nothing pinned. {where}", "small"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>What a call costs: gpuworker beside other ways between processes</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def ordered(results: Results, cell: Cell, metric: str, more_is_better: bool) -> list[tuple[str, float, bool]]:
    """(name, figure, whether it is ours), the best first."""
    figures = [(title, results.median(name, cell, metric), name.startswith("gpuworker")) for name, title in SHOWN.items()]
    return sorted((row for row in figures if row[1] is not None), key=lambda row: row[1], reverse=more_is_better)


def bars(x: int, title: str, rows: list[tuple[str, float, bool]]) -> list[str]:
    """One panel at this place. Its scale begins at 0."""
    longest, parts = max(value for _, value, _ in rows), [text(x, 34, title, "title")]
    for at, (name, value, is_ours) in enumerate(rows):
        y, length = TOP + at * ROW, max(1.0, value / longest * (WIDTH - LABEL - FIGURE))
        kind = "ours" if is_ours else "other"
        parts.append(text(x, y + 12, name, kind if is_ours else ""))
        parts.append(f'<rect class="{kind}" x="{x + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>')
        parts.append(text(x + LABEL + length + 6, y + 12, number(float(f"{value:.3g}")) if value >= 1000 else number(value), kind if is_ours else ""))
    return parts


def text(x: float, y: float, words: str, kind: str) -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{html.escape(words)}</text>"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(source).read_text())))
