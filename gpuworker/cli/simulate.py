"""`gpuworker simulate`: what would become of these requests, under this scheduler and others? No GPU and no worker is needed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuworker.cli.numbers import count, counts, positive, positive_list, seed, share, wait
from gpuworker.cli.stdout import show
from gpuworker.cli.target import CommandError
from gpuworker.cli.text import rate, shorten, span, table

if TYPE_CHECKING:  # at run time only this command loads the simulator
    from gpuworker.scheduling import Queued
    from gpuworker.testing.comparison import Comparison, Setting
    from gpuworker.testing.traces import Trace

POLICIES = ("ours", "eager", "size-timeout", "reject-expired", "clipper", "clipper-e2e", "clockwork", "bentoml", "nexus", "edf-head")
REQUESTS = 20_000
LONGEST_MMPP_S, FASTEST_MMPP_PER_S = 400_000.0, 1e7
"""A million bursts; millions of requests in one."""
HEAD = ("POLICY", "GOODPUT", "RATIO", "LATE", "REJECTED", "MEAN", "P50", "P99", "BATCH", "BUSY")

EXAMPLE = """\
example:
  gpuworker simulate --cost "5+0.25b" --latency-budget-ms 26 --load 0.8,1.0

  A batch of b requests takes 5 + 0.25 b ms. Which share of them is answered
  within 26 ms, when they come at 80 % and at 100 % of the rate that full
  batches can serve?

the table:
  GOODPUT, LATE, REJECTED  of all requests, in %: answered in time, answered
                           late, rejected at enqueue + at dispatch
  RATIO                    goodput / that of the best schedule there is for
                           these arrivals; - where none can be computed, that
                           is for requests of different lengths, noise, and
                           millions of requests or batches of thousands
  MEAN, P50, P99           latency of those that were answered, in ms
  BATCH, BUSY              mean batch size; share of time the device ran

requests that are longer than the last of --length-buckets, or than
--max-batch-tokens, are refused at enqueue, as the worker does. Under
--max-batch-tokens policies that know nothing of lengths get the batch size
with which the longest requests fit.

policies:
  ours            what `gpuworker serve --latency-budget-ms` does
  eager           whatever is there, at once
  size-timeout    what `gpuworker serve --max-wait-ms` does
  reject-expired  the same, but drops what has expired (Triton)
  clipper, clipper-e2e (AIMD on the run time, on the latency), clockwork,
  bentoml, nexus, edf-head: see gpuworker/testing/rivals.py
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="try schedulers on arrivals of your choice, without a GPU",
        usage="%(prog)s (--cost FORMULA | --profile FILE) [options]",
        description="Simulates one device that serves requests in batches: the worker's own scheduler and others, on the same arrivals.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_argument_group("arrivals").add_mutually_exclusive_group()
    source.add_argument(
        "--arrivals", choices=("poisson", "mmpp", "uniform"), default="poisson", help="poisson, mmpp (4x bursts) or uniform (default: poisson)"
    )
    source.add_argument("--trace", metavar="FILE", help="recorded arrivals: CSV with a header (Azure LLM inference, ...) or JSONL (Mooncake)")
    speed = parser.add_argument_group("how fast they come").add_mutually_exclusive_group()
    speed.add_argument(
        "--load",
        type=positive_list,
        metavar="X,...",
        help="shares of what full batches of mean length can serve (default: 0.8, or the trace's own rate)",
    )
    speed.add_argument("--rate", type=positive_list, metavar="R,...", help="requests a second")
    parser.add_argument("--requests", type=count, metavar="N", help="how many (default: 20000, or the whole trace)")
    device = parser.add_argument_group("device").add_mutually_exclusive_group(required=True)
    device.add_argument(
        "--cost", metavar="FORMULA", help='run time in ms, e.g. "5+0.25b" or "5+0.25b+0.002t": for a batch, each request, each token with padding'
    )
    device.add_argument("--profile", metavar="FILE", help='measured run times, JSON: {"8x128": 6.5, ...}, size x length: ms')
    parser.add_argument("--noise", type=share, default=0.0, metavar="X", help="standard deviation of the logarithm of run times (default: 0)")
    worker = parser.add_argument_group("worker")
    worker.add_argument("--max-batch-size", type=count, default=32, metavar="N", help="(default: 32)")
    worker.add_argument(
        "--latency-budget-ms", type=positive, metavar="MS", help="from enqueue to answer (default: twice the run time of a full batch)"
    )
    worker.add_argument("--max-wait-ms", type=wait, metavar="MS", help="cap of the wait for company (default: none for ours, 5 for size-timeout)")
    worker.add_argument(
        "--length-buckets", type=counts, default=(), metavar="N,...", help="lengths that requests are padded to (default: a batch's longest)"
    )
    worker.add_argument(
        "--max-batch-tokens", type=count, metavar="N", help="most that a batch may hold: its size times the length it is padded to (default: any)"
    )
    worker.add_argument("--allowed-batch-sizes", type=counts, default=(), metavar="N,...", help="sizes that batches are padded to (default: any)")
    worker.add_argument(
        "--late", choices=("reject", "serve"), default="reject", help="what ours does with requests that cannot be in time (default: reject)"
    )
    worker.add_argument("--wait", choices=("auto", "until_deadline"), default="auto", help="how long ours waits for company (default: auto)")
    worker.add_argument(
        "--admission", choices=("auto", "on", "off"), default="auto", help="whether clients of ours forecast before they send (default: auto)"
    )
    parser.add_argument("--policy", type=policies, default=policies("ours,size-timeout,eager"), metavar="P,...", help='see below; or "all"')
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of arrivals and noise (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - prints them instead of the table")
    parser.add_argument("--png", metavar="FILE", help="draw goodput against load, and latency (needs matplotlib)")
    parser.set_defaults(run=run)


def policies(text: str) -> list[str]:
    """An argument type."""
    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{shorten(name, 40)}: choose from {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def run(args: argparse.Namespace) -> int:
    """Simulates, and shows what came out."""
    from gpuworker.testing.comparison import compare

    try:
        trace = read(args)
        setting = device(args, trace)
        comparisons = [
            compare(setting, requests(args, trace, rate_per_s), args.policy, load, rate_per_s) for load, rate_per_s in speeds(args, setting, trace)
        ]
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    if args.json != "-":
        show("\n".join(report(setting, comparisons)) + "\n")
    if args.json:
        write_json(args, setting, comparisons)
    if args.png:
        draw(args.png, setting, comparisons)
    return 0


def read(args: argparse.Namespace) -> Trace | None:
    """The trace, if there is one, as long as asked."""
    if not args.trace:
        return None
    from gpuworker.testing.traces import read_trace

    trace = read_trace(args.trace)
    try:
        return trace.first(args.requests)
    except ValueError as error:
        raise ValueError(f"{args.trace}, --requests {args.requests}: {error}") from None


def device(args: argparse.Namespace, trace: Trace | None) -> Setting:
    """The device, and what is asked of it."""
    from gpuworker.scheduling.cost_model import LONGEST_NS
    from gpuworker.testing import costs
    from gpuworker.testing.comparison import Setting
    from gpuworker.testing.traces import LONGEST_S

    args.max_batch_size = max_batch_size(args)
    cost_ns = costs.profile(args.profile, args.max_batch_size) if args.profile else costs.formula(args.cost)
    longest = int(trace.lengths.max()) if trace else 0
    if not longest and cost_ns(1, 1_000) != cost_ns(1, 0):
        raise ValueError("the cost depends on the requests' lengths, and these have none: give a --trace that has")
    if not longest and args.max_batch_tokens:
        raise ValueError("--max-batch-tokens counts the requests' lengths, and these have none: give a --trace that has")
    setting = Setting(
        cost_ns, args.max_batch_size, round((args.latency_budget_ms or 0) * 1e6), max_wait_ms=args.max_wait_ms,
        length_buckets=args.length_buckets, max_batch_tokens=args.max_batch_tokens, allowed_batch_sizes=args.allowed_batch_sizes,
        late=args.late, wait=args.wait, admission=args.admission, longest=longest, noise=args.noise, seed=args.seed,
    )  # fmt: skip
    if trace and setting.limit is not None and int(trace.lengths.min()) > setting.limit:
        raise ValueError(f"all requests are longer than {setting.limit}, and would be refused: see --length-buckets and --max-batch-tokens")
    shortest, total = (int(trace.lengths.min()), len(trace.lengths)) if trace else (0, args.requests or REQUESTS)
    slowest_ns = max(setting.table_ns[-1], setting.padded_ns(setting.fitting(shortest), shortest))
    if slowest_ns > LONGEST_NS:
        raise ValueError(f"a full batch would run {span(slowest_ns / 1e9)}: give a lower cost (it is in ms), at most a day can be simulated")
    if slowest_ns * total > LONGEST_S * 1e9:
        raise ValueError(
            f"{total:,} requests, where a full batch runs {span(slowest_ns / 1e9)}, may take years: give fewer --requests, or a lower cost"
        )
    return setting if setting.budget_ns else dataclasses.replace(setting, budget_ns=2 * setting.table_ns[-1])


def max_batch_size(args: argparse.Namespace) -> int:
    """As the worker makes it of these options. Raises ValueError for those that it would not take."""
    from gpuworker.worker import WorkerOptions

    names = ("max_batch_size", "latency_budget_ms", "max_wait_ms", "length_buckets", "max_batch_tokens", "allowed_batch_sizes")
    return WorkerOptions.of({name: value for name in names if (value := getattr(args, name)) not in (None, ())}).max_batch_size


def speeds(args: argparse.Namespace, setting: Setting, trace: Trace | None) -> list[tuple[float, float]]:
    """(load, requests a second) for each run."""
    mean_length = round(float(trace.lengths[trace.lengths <= (setting.limit or setting.longest)].mean())) if trace else 0
    size = setting.fitting(mean_length)
    capacity_per_s = size / setting.padded_ns(size, mean_length) * 1e9
    if trace and not args.load and not args.rate:
        args.rate = [trace.rate_per_s]
    if args.rate:
        return [(rate_per_s / capacity_per_s, rate_per_s) for rate_per_s in args.rate]
    return [(load, load * capacity_per_s) for load in args.load or [0.8]]


def requests(args: argparse.Namespace, trace: Trace | None, rate_per_s: float) -> Sequence[Queued]:
    """The requests, at that rate."""
    from gpuworker.scheduling import Queued
    from gpuworker.testing import arrivals
    from gpuworker.testing.traces import check_rate, scaled

    if trace:
        return scaled(trace, rate_per_s).requests()
    total = args.requests or REQUESTS
    if args.arrivals == "mmpp":
        check_rate(total, rate_per_s, LONGEST_MMPP_S, FASTEST_MMPP_PER_S)
        times_ns = arrivals.mmpp(rate_per_s, total, args.seed)
    else:
        check_rate(total, rate_per_s)
        times_ns = arrivals.uniform(rate_per_s, total) if args.arrivals == "uniform" else arrivals.poisson(rate_per_s, total, args.seed)
    return [Queued(i, at) for i, at in enumerate(times_ns.tolist())]


def report(setting: Setting, comparisons: Sequence[Comparison]) -> list[str]:
    """A table for each load."""
    lines = [f"latency budget {span(setting.budget_ns / 1e9)}, a full batch runs {span(setting.table_ns[-1] / 1e9)}"]
    for compared in comparisons:
        rows = [HEAD, *(row(name, compared) for name in compared.simulations)]
        requests = next(iter(compared.simulations.values())).requests
        total, refused = len(requests), sum(not setting.takes(request) for request in requests)
        best = f"; the best schedule answers {100 * compared.best / total:.1f} % in time" if compared.best is not None else ""
        lines += ["", f"load {compared.load:.2f}, {rate(compared.rate_per_s)}, {total:,} requests{best}"]
        lines += [f"{refused:,} of them are longer than {setting.limit}: refused at enqueue"] if refused else []
        lines += [*table(rows, "<>>>>>>>>>")]
    return lines


def row(name: str, compared: Comparison) -> tuple[str, ...]:
    """One line of the table."""
    from gpuworker.testing import Outcome

    simulation, ratio = compared.simulations[name], compared.ratio(name)
    shares = [100 * simulation.count(outcome) / len(simulation.requests) for outcome in Outcome]
    latencies = [value / 1e6 for value in (simulation.mean_latency_ns, *map(simulation.latency_percentile_ns, (50, 99)))]
    return (
        name, f"{shares[0]:.2f}", "-" if ratio is None else f"{ratio:.4f}", f"{shares[1]:.1f}", f"{shares[2]:.1f}+{shares[3]:.1f}",
        *("-" if value != value else f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in latencies),
        f"{simulation.mean_batch_size:.1f}", f"{100 * simulation.busy_share:.0f}%",
    )  # fmt: skip


def write_json(args: argparse.Namespace, setting: Setting, comparisons: Sequence[Comparison]) -> None:
    """All figures, to the file or to stdout."""
    given = {name: value for name, value in vars(args).items() if name not in ("run", "json", "png")}
    figures = {"options": given, "latency_budget_ms": setting.budget_ns / 1e6, "runs": [compared.to_dict() for compared in comparisons]}
    text = json.dumps(figures, indent=2) + "\n"
    if args.json == "-":
        show(text)
        return
    try:
        Path(args.json).write_text(text)
    except OSError as error:
        raise CommandError(f"--json: {error}") from None


def draw(path: str, setting: Setting, comparisons: Sequence[Comparison]) -> None:
    """The picture."""
    from gpuworker.testing.charts import chart

    try:
        chart(comparisons, setting.budget_ns, path)
    except ImportError:
        raise CommandError("--png needs matplotlib: pip install 'gpuworker[plot]'") from None
    except OSError as error:
        raise CommandError(f"--png: {error}") from None
