"""One worker's statistics on a screen of 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpuworker.cli.device import execution
from gpuworker.cli.generation import generation
from gpuworker.cli.interval import BUDGET_COUNTERS, COUNTERS, STAGES, Interval, with_budget
from gpuworker.cli.text import WIDTH, bar, count, rate, span, table
from gpuworker.segment.stats import Histogram, Stats

LABELS = {
    "reaped_clients": "dead clients", "on_time": "on time", "rejected_forecast": "forecast late", "rejected_late": "given up"
}  # fmt: skip
MAX_SIZE_ROWS, MAX_CLIENT_ROWS = 10, 8
BAR_WIDTH = 36


def lines(stats: Stats, recent: Interval | None = None) -> list[str]:
    """The screen. With `recent`: totals with rates; waits and batches of the interval alone."""
    shown = recent.stats if recent else stats
    since = f" in the last {span(recent.elapsed_s)}" if recent else ""
    return [
        *heading(stats), "",
        "requests", *requests(stats, recent), "",
        *budget(stats, recent),
        f"waits{since}", *waits(shown), "",
        f"batches{since}: {batches(shown, recent)}", *reasons(shown), *predictions(shown), *sizes(shown), "",
        *execution(stats.execution),
        *generation(shown.generation, recent.elapsed_s if recent else None),
        f"slots: {stats.slots_in_use} of {stats.capacity} in use by {count(len(stats.clients), 'client process', 'client processes')}",
        *occupancy(stats),
    ]  # fmt: skip


def heading(stats: Stats) -> list[str]:
    """Who it is, and what is remarkable about it now."""
    state = stats.condition()
    is_over = state in ("dead", "failed")
    up = "" if is_over else f", up {span(stats.uptime_s)}"
    found = [f"worker {stats.name}: {state}, process {stats.owner_pid}{up}", f"handler {stats.handler or '(not known yet)'}"]
    if state == "dead":
        found += [f"it died while {stats.state}{last_sign(stats)}", "the next start of this name takes its segment over"]
    elif state == "failed":
        found += ["it is not started again, as:", *stats.note.splitlines(), "the next start of this name takes its segment over"]
    elif state == "silent":
        found.append(silent(stats.heartbeat_age_s))
    if stats.restarts and not is_over:
        found.append(restarted(stats.restarts, stats.cause()))
    if stats.batch_running_s and not is_over:
        found.append(f"a batch has been running for {span(stats.batch_running_s)}")
    return found


def silent(heartbeat_age_s: float) -> str:
    """Of an owner without a heartbeat."""
    return f"no heartbeat for {span(heartbeat_age_s)}: its handler holds the GIL, or the process is stopped"


def restarted(times: int, cause: str) -> str:
    """Of owners that have died. cause: of the last one."""
    return f"its owner was started again {count(times, 'time')}; last because {cause}"


def last_sign(stats: Stats) -> str:
    """When a dead owner was last heard of; nothing for one that never was."""
    return f", last heard of {span(stats.heartbeat_age_s)} ago" if stats.heartbeat_age_s else ""


def requests(stats: Stats, recent: Interval | None) -> list[str]:
    """Counts by outcome, two to a line; what never happened and rarely does is left out."""
    shown = [pair for pair in COUNTERS if pair not in COUNTERS[3:] or any(getattr(stats, name) for name in pair)]
    return counters(shown, stats, recent)


def counters(pairs: Sequence[tuple[str, str]], stats: Stats, recent: Interval | None) -> list[str]:
    """Two counts to a line, with their rates."""
    rows = []
    for pair in pairs:
        cells: list[str] = []
        for name in pair:
            per_s = rate(getattr(recent.stats, name) / recent.elapsed_s) if recent else ""
            cells += [LABELS.get(name, name), f"{getattr(stats, name):,}", per_s, ""]
        rows.append(cells[:-1])
    return table(rows, "<>><<>>", "  ")


def budget(stats: Stats, recent: Interval | None) -> list[str]:
    """How many were in time, and what became of the others; nothing where no request has a latency budget."""
    shown = recent.stats if recent else stats
    budget_ms = stats.number("latency_budget_ms")
    if budget_ms is None:
        return []
    since = f" in the last {span(recent.elapsed_s)}" if recent else ""
    share = f"{shown.goodput:.1%} on time" if with_budget(vars(shown)) else "no answers yet" if not recent else "no answers"
    return [f"latency budget of {span(budget_ms / 1e3)}{since}: {share}", *counters(BUDGET_COUNTERS, stats, recent), ""]


def predictions(stats: Stats) -> list[str]:
    """How well run times were predicted, and what padding cost; what is not used is left out."""
    found = []
    if stats.predicted_batches:
        predicted, observed = span(stats.predicted_run_ms / 1e3), span(stats.observed_run_ms / 1e3)
        found.append(f"  ran {observed}, predicted {predicted}; {stats.overruns / stats.predicted_batches:.1%} took longer than predicted")
    if stats.padding:
        found.append(f"  padding: {stats.padding:.3g} tokens were run for each real one")
    return found


def waits(stats: Stats) -> list[str]:
    """Where a request spends its time, stage by stage."""
    rows = [("", "", "p50", "p99", "mean", "count")]
    for stage, what in STAGES.items():
        h: Histogram = getattr(stats, stage)
        times = [span(us / 1e6) if h.count else "-" for us in (h.p50_us, h.p99_us, h.mean_us)]
        rows.append((stage.removesuffix("_wait"), what, times[0], times[1], times[2], f"{h.count:,}"))
    return table(rows, "<<>>>>", "  ")


def batches(stats: Stats, recent: Interval | None) -> str:
    """How many batches of what size."""
    if not stats.batches:
        return "none"
    per_s = f" ({rate(stats.batches / recent.elapsed_s)})" if recent else ""
    most = stats.number("max_batch_size") or "?"
    return f"{stats.batches:,}{per_s}, mean size {stats.mean_batch_size:.3g} of {most}"


def reasons(stats: Stats) -> list[str]:
    """Why batches left, the commonest reason first."""
    total = sum(stats.dispatch_reasons.values())
    why = [f"{reason} {n / total:.0%}" for reason, n in sorted(stats.dispatch_reasons.items(), key=lambda item: -item[1]) if n]
    return textwrap.wrap(f"  left because: {', '.join(why)}", WIDTH, subsequent_indent=" " * 16) if why else []


def sizes(stats: Stats) -> list[str]:
    """Batch sizes as bars; by powers of two where there are many sizes."""
    groups = grouped(stats.batch_sizes, MAX_SIZE_ROWS, int(stats.number("max_batch_size") or 0))
    total = sum(groups.values())
    return table([(size, f"{n:,}", f"{n / total:.0%}", bar(n, total, BAR_WIDTH)) for size, n in groups.items()], ">>><", "  ")


def grouped(batch_sizes: dict[str, int], most_rows: int, max_batch_size: int) -> dict[str, int]:
    """The same, by powers of two where there are more sizes than rows. max_batch_size: where the last group ends, 0 for not known."""
    if len(batch_sizes) <= most_rows:
        return batch_sizes
    groups: dict[str, int] = {}
    for label, n in batch_sizes.items():
        low = 1 << max(int(label.partition("-")[0]).bit_length() - 1, 0)
        high = min(2 * low - 1, max(max_batch_size or 2 * low - 1, low))
        group = f"{low}-{high}" if high > low else f"{low}"
        groups[group] = groups.get(group, 0) + n
    return groups


def occupancy(stats: Stats) -> list[str]:
    """Slots held by each client process, the greediest first."""
    clients = sorted(stats.clients, key=lambda client: (-client.slots_held, client.pid))
    rows = [(f"{c.pid}", f"{c.slots_held:,}", bar(c.slots_held, stats.capacity, BAR_WIDTH)) for c in clients[:MAX_CLIENT_ROWS]]
    found = table([("pid", "slots", ""), *rows], "<><", "  ") if rows else []
    rest = clients[MAX_CLIENT_ROWS:]
    if rest:
        found.append(f"  and {len(rest):,} more with {count(sum(client.slots_held for client in rest), 'slot')}")
    return found
