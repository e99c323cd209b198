"""The screen of `gpuworker top`: two columns that fit 80x24, and show more where there is more room. Pure: rates in, styled text out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpuworker.cli.rates import Device, Generating, Rates, Wait
from gpuworker.cli.screen import grouped, restarted, silent
from gpuworker.cli.text import bar, count, rate, shorten, size, span

Piece = tuple[str, str]
Line = list[Piece]
"""Pieces of text, each with its style: "", "title", "dim", "mark", "good", "bad"."""


class Glyphs(NamedTuple):
    """What bars and curves are drawn with. `ramp`: from nothing to the most."""

    bar: str
    ramp: str


ASCII, BLOCKS = Glyphs("#", " .:-=+*#"), Glyphs("█", " ▁▂▃▄▅▆▇█")
GAP = 2
OUTCOME_ROWS = {
    "submitted": "submitted", "completed": "completed", "failed": "failed", "rejected": "rejected", "expired": "expired", "cancelled": "cancelled",
    "fallbacks": "fallbacks", "requeued": "run again",
}  # fmt: skip
ALWAYS = ("submitted", "completed", "failed", "rejected")
BAD = ("failed", "rejected", "expired", "late", "rejected_late", "rejected_forecast", "requeued")


def lines(rates: Rates, history: Mapping[str, Sequence[float]], width: int, height: int, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """At most `height` lines of at most `width` characters. history: for "submitted", "completed" and "batches", their rates so far, the newest last."""
    top = heading(rates)
    room = max(height - len(top) - 1, 0)
    two = width >= 76
    column = (width - GAP) // 2 if two else width
    left = [*requests(rates, history, column, glyphs), [], *waits(rates, glyphs), []]
    left += occupancy(rates, column, glyphs, max(room - len(left) - 1, 1) if two else 4)
    figures = limits(rates)
    right = [*batches(rates, column, glyphs, max(room - len(figures) - 4, 3) if two else 4), [], *figures]
    body = beside(left, right, column) if two else [*left, [], *right]
    return [fitted(line, width) for line in [*top, [], *body][:height]]


def heading(rates: Rates) -> list[Line]:
    """Who it is, and what is remarkable about it now."""
    is_over = rates.state in ("dead", "failed")
    state = "good" if rates.state == "serving" else "bad"
    up = "" if is_over else f", up {span(rates.uptime_s)}"
    found: list[Line] = [[(rates.name, "title"), (" ", ""), (rates.state, state), (f"  process {rates.owner_pid}{up}  {rates.handler}", "dim")]]
    if is_over:
        found.append([(rates.note if rates.state == "failed" else f"last heard of {span(rates.heartbeat_age_s)} ago", "bad")])
    elif rates.state == "paused":
        found.append([("nothing begins until it is resumed; deadlines go on", "bad")])
    elif rates.state == "silent":
        found.append([(silent(rates.heartbeat_age_s), "bad")])
    elif rates.restarts:
        found.append([(restarted(rates.restarts, rates.note), "bad")])
    elif rates.batch_running_s > 1:
        found.append([(f"a batch has been running for {span(rates.batch_running_s)}", "bad")])
    return found


def requests(rates: Rates, history: Mapping[str, Sequence[float]], width: int, glyphs: Glyphs) -> list[Line]:
    """Requests a second by outcome, with their course where that is known."""
    found: list[Line] = [[("requests", "title"), ("        now", "dim"), ("      total", "dim")]]
    for name, label in OUTCOME_ROWS.items():
        if name in ALWAYS or rates.totals[name]:
            now = rates.per_s[name]
            style = "bad" if now and name in BAD else ""
            line: Line = [(f"  {label:<9}", "dim"), (f"{rate(now):>8}", style), (f" {short(rates.totals[name]):>10}", "dim")]
            line.append((" " + curve(history.get(name, ()), width - 31, glyphs), "mark"))
            found.append(line)
    return found


def waits(rates: Rates, glyphs: Glyphs) -> list[Line]:
    """Where requests spent their time, stage by stage."""
    found: list[Line] = [[("waits  ", "title"), (f"{'p50':>8}{'p99':>8}", "dim"), ("  1us  1ms  1s", "dim")]]
    for stage, wait in rates.waits.items():
        p50, p99 = (f"{span(us / 1e6) if wait.count else '-':>8}" for us in (wait.p50_us, wait.p99_us))
        found.append([(f"  {stage:<5}", "dim"), (p50, ""), (p99, ""), (" " + spread(wait, glyphs), "mark")])
    return found


def spread(wait: Wait, glyphs: Glyphs) -> str:
    """A histogram in a line, from 256 ns to 4 s: two octaves a character."""
    pairs = [sum(wait.octaves[i : i + 2]) for i in range(0, len(wait.octaves), 2)]
    return curve(pairs, len(pairs), glyphs)


def batches(rates: Rates, width: int, glyphs: Glyphs, rows: int) -> list[Line]:
    """How many batches of what size, and why they left."""
    most = f" of {rates.max_batch_size}" if rates.max_batch_size else ""
    mean = f", mean {rates.mean_batch_size:.3g}{most}" if rates.per_s["batches"] else ""
    found: list[Line] = [[("batches ", "title"), (f" {rate(rates.per_s['batches'])}{mean}", "")]]
    groups = grouped(rates.batch_sizes, rows, rates.max_batch_size)
    commonest = sorted(groups, key=lambda label: -groups[label])[:rows]
    total, most_of_one = sum(groups.values()), max(groups.values(), default=0)
    for label in (label for label in groups if label in commonest):
        n = groups[label]
        found.append(
            [(f"{label:>9}", "dim"), (f"{n / total:>5.0%} ", ""), (bar(n, most_of_one, max(width - 16, 1)).replace("#", glyphs.bar), "mark")]
        )
    why = ", ".join(f"{reason} {share:.0%}" for reason, share in rates.reasons.items())
    for i, line in enumerate(textwrap.wrap(why or "-", max(width - 10, 12))):
        found.append([("  because " if not i else " " * 10, "dim"), (line, "")])
    return found


def limits(rates: Rates) -> list[Line]:
    """What budgets, padding, the device and generation come to; nothing of what the worker has not."""
    found: list[Line] = []
    if rates.latency_budget_ms:
        share = "-" if rates.goodput is None else f"{rates.goodput:.1%}"
        found.append(named("on time", f"{share} within {span(rates.latency_budget_ms / 1e3)}"))
    if rates.padding:
        found.append(named("padding", f"{1 - 1 / rates.padding if rates.padding > 1 else 0:.1%} of tokens run are waste"))
    if rates.device is not None:
        found += device(rates.device)
    if rates.generation is not None:
        found += generation(rates.generation)
    return found


def device(found: Device) -> list[Line]:
    """Of a worker of tensors."""
    shown = [named("device", f"{found.busy:.0%} busy, {span(found.device_ms / 1e3)} a batch" if found.device_ms else "idle")]
    if found.row_padding > 1:
        shown.append(named("rows", f"{1 - 1 / found.row_padding:.1%} of rows run are padding"))
    if found.graph_hits is not None:
        shown.append(named("graphs", f"{found.graph_hits:.1%} of batches, {count(found.graphs, 'graph')}"))
    if found.memory_total_bytes:
        shown.append(named("memory", f"{size(found.memory_bytes)} of {size(found.memory_total_bytes)}"))
    return shown


def generation(found: Generating) -> list[Line]:
    """Of a worker that generates."""
    blocks, per_s = found.blocks_used + found.blocks_free, found.per_s
    shown = [
        named("tokens", f"{rate(per_s['tokens'])}, prompts {rate(per_s['prompt_tokens'])}"),
        named("prefix", f"{rate(per_s['prefix_hit_tokens'])} found, {rate(per_s['preemptions'])} preempted"),
        named("running", f"{found.running}, waiting {found.waiting}, {rate(per_s['steps'])} steps"),
        named("blocks", f"{found.blocks_used:,} of {blocks:,} used, {found.waste:.1%} empty"),
    ]
    if found.graph_hits is not None:
        shown.append(named("graphs", f"{found.graph_hits:.1%} of decode steps, {count(found.graphs, 'graph')}"))
    return shown


def occupancy(rates: Rates, width: int, glyphs: Glyphs, rows: int) -> list[Line]:
    """Slots in use, and by whom."""
    found: list[Line] = [
        [("slots", "title"), (f"{rates.slots_in_use:>12} of {rates.capacity}", ""), (f", {count(len(rates.clients), 'client')}", "dim")]
    ]
    shown = list(rates.clients.items())
    if len(shown) > rows:
        shown = shown[: rows - 1]
    for pid, held in shown:
        found.append([(f"  {pid:<9}", "dim"), (f"{held:>6} ", ""), (bar(held, rates.capacity, max(width - 18, 1)).replace("#", glyphs.bar), "mark")])
    rest = len(rates.clients) - len(shown)
    if rest:
        found.append([(f"  and {rest:,} more with {count(sum(list(rates.clients.values())[len(shown) :]), 'slot')}", "dim")])
    return found


def named(name: str, words: str) -> Line:
    """One figure."""
    return [(f"  {name:<8}", "dim"), (words, "")]


def curve(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The last `width` values, as high as the highest of them allows; anything above nothing shows."""
    shown = list(values)[-width:] if width > 0 else []
    most = max(shown, default=0)
    top = len(glyphs.ramp) - 1
    return "".join(glyphs.ramp[max(round(value / most * top), 1) if value > 0 else 0] for value in shown) if most else ""


def short(n: float) -> str:
    """A count in at most 7 characters."""
    for unit, of in (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if n < 99_999.5 * of or unit == "G":
            return f"{n / of:,.0f}{unit}"
    raise AssertionError


def beside(left: list[Line], right: list[Line], column: int) -> list[Line]:
    """Two columns."""
    rows = max(len(left), len(right))
    padded = [*left, *([[]] * (rows - len(left)))]
    others = [*right, *([[]] * (rows - len(right)))]
    joined: list[Line] = []
    for a, b in zip(padded, others, strict=True):
        a = fitted(a, column)
        joined.append([*a, (" " * (column + GAP - sum(len(text) for text, _ in a)), ""), *b])
    return joined


def fitted(line: Line, width: int) -> Line:
    """Cut where it is longer."""
    kept: Line = []
    for text, style in line:
        room = width - sum(len(before) for before, _ in kept)
        if len(text) > room:
            kept.append((shorten(text, room) if room > 12 else text[:room], style))
            break
        kept.append((text, style))
    return kept


def plain(found: Sequence[Line]) -> list[str]:
    """Without styles."""
    return ["".join(text for text, _ in line).rstrip() for line in found]
