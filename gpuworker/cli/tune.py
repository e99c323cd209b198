"""`gpuworker tune`: which options suit this handler under this traffic? Measures the handler here, and simulates the worker's own scheduler with that."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuworker.cli.numbers import count, positive, seed, share
from gpuworker.cli.stdout import show, stdout_is_stderr
from gpuworker.cli.target import CommandError
from gpuworker.cli.text import bar, rate, span, table
from gpuworker.worker.owner_process import OWNER_ENVIRONMENT

if TYPE_CHECKING:  # at run time only this command loads the simulator
    from gpuworker.testing.traces import Trace
    from gpuworker.tuning.measure import Profile
    from gpuworker.tuning.prediction import Traffic
    from gpuworker.tuning.recommendation import Recommendation
    from gpuworker.worker.handler import Handler

REQUESTS = 10_000
HEAD = ("LOAD", "RATE", "IN TIME", "", "MEAN", "P99", "BATCH", "BUSY")
BAR = 20

EXAMPLE = """\
example:
  gpuworker tune myapp.model:Embedder --latency-budget-ms 50 --rate 200

  Loads the handler, measures its run_batch, and prints the command line that
  answers most of 200 requests a second within 50 ms, and how many those are.

the handler:
  warmup()         has to return a list of requests to measure with; of
                   different lengths if the handler has length(request)
  example(length)  may return a request of about that length: with it, lengths
                   are measured that no request of warmup() has

the traffic:
  --rate   Poisson arrivals; their lengths are drawn from those of warmup()
  --trace  recorded arrivals and lengths; with --rate sped up or slowed down to
           that. Options are chosen by its first half; what is predicted is
           what becomes of its second half.

what is chosen:
  max_batch_size, max_wait_ms, wait and, where lengths matter, length_buckets:
  most requests in time; then fewest late, least mean latency, least time of
  the device; then fewest options. allowed_batch_sizes only with --pads, as
  the worker does not pad batches: a handler with CUDA graphs does.
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="find the options that suit a handler and its traffic",
        usage="%(prog)s MODULE:ATTR --latency-budget-ms MS (--rate R | --trace FILE) [options]",
        description="Measures a handler in this process, and searches for the options with which a worker answers most requests in time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("handler", metavar="MODULE:ATTR", help="as for `gpuworker serve`; it needs a warmup(), see below")
    parser.add_argument("--latency-budget-ms", type=positive, required=True, metavar="MS", help="what a request may take, from enqueue to answer")
    parser.add_argument("--rate", type=positive, metavar="R", help="requests a second")
    parser.add_argument("--trace", metavar="FILE", help="recorded requests: CSV with a header (Azure LLM inference, ...) or JSONL (Mooncake)")
    parser.add_argument("--requests", type=count, default=REQUESTS, metavar="N", help=f"how many to simulate at most (default: {REQUESTS:,})")
    parser.add_argument("--limit-s", type=positive, default=60.0, metavar="SECONDS", help="longest that measuring may take (default: 60)")
    parser.add_argument("--max-batch-size", type=count, default=128, metavar="N", help="largest batch to try (default: 128)")
    parser.add_argument(
        "--target", type=share, default=0.99, metavar="X", help="share in time that counts as served, for the capacity (default: 0.99)"
    )
    parser.add_argument("--pads", action="store_true", help="the handler pads its batches to allowed_batch_sizes: choose those too")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of arrivals, lengths and noise (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - prints them instead of the report")
    parser.add_argument("--png", metavar="FILE", help="draw goodput and latency against the rate (needs matplotlib)")
    parser.add_argument("--profile-out", metavar="FILE", help="write the run times there, for `gpuworker simulate --profile`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tunes, and shows what came out."""
    for name, value in OWNER_ENVIRONMENT.items():  # the handler is to run as it will
        os.environ.setdefault(name, value)
    from gpuworker.testing.traces import check_rate
    from gpuworker.tuning.recommendation import recommend
    from gpuworker.worker import WorkerOptions

    try:
        if not args.rate and not args.trace:
            raise ValueError("how fast do requests come? give --rate or --trace")
        if args.requests < 100:
            raise ValueError(f"--requests {args.requests}: give at least 100, half of them are to choose the options by")
        WorkerOptions.of({"latency_budget_ms": args.latency_budget_ms, "max_batch_size": args.max_batch_size})
        trace = read_trace(args)
        if trace is None:
            check_rate(args.requests, args.rate)
        with stdout_is_stderr():
            lengths, profile, args.pads = measured_by(args, trace)
        traffic = traffic_of(args, trace, lengths)
        found = recommend(
            profile, traffic, args.latency_budget_ms,
            max_batch_size=args.max_batch_size, target=args.target, pads=args.pads, seed=args.seed,
        )  # fmt: skip
        WorkerOptions.of(found.options)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
    command = command_line(args.handler, found.options)
    if args.json != "-":
        show("\n".join(report(args, profile, traffic, found, command)) + "\n")
    if args.json:
        write("--json", args.json, {**given(args), **measures(profile, traffic), **found.to_dict(), "command": command})
    if args.profile_out:
        write("--profile-out", args.profile_out, profile.medians_ms())
    if args.png:
        draw(args, found)
    return 0


def measured_by(args: argparse.Namespace, trace: Trace | None) -> tuple[Sequence[int], Profile, bool]:
    """The lengths that occur, the handler's run times, and whether it pads its batches. All of the handler's code that is run, is run in here."""
    handler = loaded(args.handler, args.max_batch_size)
    try:
        lengths = lengths_of(handler, trace)
        return lengths, measured(handler, lengths, args), args.pads or handler.contract is not None
    finally:
        with users_code("close()", handler):
            handler.close()


def read_trace(args: argparse.Namespace) -> Trace | None:
    """The trace, if there is one, as long and as fast as asked."""
    if not args.trace:
        return None
    from gpuworker.testing.traces import check_rate, read_trace, scaled

    trace = read_trace(args.trace)
    try:
        trace = trace.first(args.requests)
        check_rate(len(trace.arrivals_ns), args.rate or trace.rate_per_s)
    except ValueError as error:
        raise ValueError(f"{args.trace}, --requests {args.requests}: {error}") from None
    if len(trace.arrivals_ns) < 100:
        raise ValueError(f"{args.trace}: {len(trace.arrivals_ns)} requests are too few to choose options by; 100 are the least")
    return scaled(trace, args.rate) if args.rate else trace


def loaded(name: str, max_batch_size: int) -> Handler:
    """The handler, loaded and warmed up in this process."""
    from gpuworker.tuning.measure import described
    from gpuworker.worker.handler import Handler
    from gpuworker.worker.options import WorkerOptions

    handler = None
    try:
        handler = Handler(name)
        handler.load(handler.suited(WorkerOptions(max_batch_size=max_batch_size)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, too
        if handler is not None or not isinstance(error, (ValueError, ImportError, AttributeError, TypeError)):  # its own code: show where
            traceback.print_exc()
        raise CommandError(f"{name} could not be loaded: {described(error)}") from None
    return handler


@contextlib.contextmanager
def users_code(what: str, handler: Handler) -> Iterator[None]:
    """An error in there is the handler's: its traceback, and one line."""
    from gpuworker.tuning.measure import NoLength, described

    try:
        yield
    except (KeyboardInterrupt, NoLength):
        raise
    except BaseException as error:  # sys.exit, too
        traceback.print_exc()
        raise CommandError(f"{what} of {handler.name} failed: {described(error)}") from None


def maker(handler: Handler) -> Any:
    """The handler's example(length), if it has one."""
    make = getattr(getattr(handler.run_batch, "__self__", handler.run_batch), "example", None)
    return make if callable(make) else None


def lengths_of(handler: Handler, trace: Trace | None) -> Sequence[int]:
    """The lengths that occur: in the trace, else in the handler's examples. None at all where they do not matter."""
    from gpuworker.tuning.measure import length_of

    if trace is not None and trace.lengths.any():
        if handler.length is None:
            raise ValueError(
                f"the trace has the lengths of its requests, and {handler.name} has no length(request) -> int: add one, or take that column out of the trace"
            )
        lengths = trace.lengths.tolist()
    else:
        with users_code("length()", handler):
            lengths = [length_of(example, handler.length) for example in handler.examples] if handler.length else []
    return lengths if len(set(lengths)) > 1 else []


def traffic_of(args: argparse.Namespace, trace: Trace | None, lengths: Sequence[int]) -> Traffic:
    """The requests to simulate. A trace without lengths gets some of `lengths`, at random."""
    import numpy as np

    from gpuworker.tuning.prediction import Traffic

    if trace is None:
        return Traffic.of_rate(args.rate, args.requests, lengths, args.seed)
    if len(lengths) and not trace.lengths.any():
        trace = trace._replace(lengths=np.random.default_rng((args.seed, 1)).choice(lengths, len(trace.lengths)))
    return Traffic.of_trace(trace)


def measured(handler: Handler, lengths: Sequence[int], args: argparse.Namespace) -> Profile:
    """The handler's run times."""
    from gpuworker.tuning.measure import RunBatchFailed, examples_by_length, measure

    with users_code("length() or example()", handler):
        examples = examples_by_length(handler.examples, handler.length, maker(handler), lengths)
    if not examples:
        raise CommandError(f"handler {handler.name} has no requests to be measured with: add a method warmup() that returns a list of examples")
    print(f"measuring {handler.name} for at most {span(args.limit_s)} ...", file=sys.stderr, flush=True)
    try:
        return measure(handler.run_batch, examples, args.max_batch_size, args.limit_s, time.monotonic_ns)
    except RunBatchFailed as error:
        raise CommandError(f"{error}. If batches were too large for it, give a lower --max-batch-size than {args.max_batch_size}") from None
    except TimeoutError as error:
        raise CommandError(f"--limit-s {args.limit_s:g}: {error}") from None


def command_line(handler: str, options: dict[str, Any]) -> str:
    """What to type."""
    words = ["gpuworker", "serve", handler, "--name", "NAME"]
    for name, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:.12g}" if isinstance(value, float) else str(value)
        words += ["--" + name.replace("_", "-"), text]
    return shlex.join(words)


def report(args: argparse.Namespace, profile: Profile, traffic: Traffic, found: Recommendation, command: str) -> list[str]:
    """All that there is to read."""
    came = f"the trace {args.trace}" if args.trace else "Poisson arrivals"
    lines = [f"{args.handler}: {came}, {rate(traffic.rate_per_s)}, latency budget {args.latency_budget_ms:g} ms", "", *run_times(profile)]
    if traffic.longest > profile.lengths[-1] > 0:
        lines.append(f"Longer ones than {profile.lengths[-1]} (there are, up to {traffic.longest}) are guessed: give the handler an example(length).")
    lines += ["", "load (1: as asked) with the recommended options, latency in ms", *curve(found), "", capacity(args.target, found)]
    lines += ["", f"recommended, of {found.tried} candidates:", f"  {command}", "", f"predicted: {predicted(found)}"]
    if found.grid is not None and not args.pads:
        sizes = ",".join(map(str, found.grid.candidate.allowed_batch_sizes))
        slower = found.grid.mean_ns / found.leader.mean_ns - 1
        lines.append(f"A handler that pads batches (CUDA graphs) can do with sizes {sizes}: mean latency {100 * max(slower, 0):+.1f} %; see --pads.")
    return lines


def run_times(profile: Profile) -> list[str]:
    """A table of what was measured."""
    head = ("LENGTH", *map(str, profile.sizes))
    rows = [
        (str(length or "any"), *("-" if (run_ms := profile.median_ms(size, length)) is None else f"{run_ms:.3g}" for size in profile.sizes))
        for length in profile.lengths
    ]
    return [f"run times by batch size, ms (vary by {100 * profile.noise:.1f} %)", *table([head, *rows], ">" * len(head))]


def curve(found: Recommendation) -> list[str]:
    """A table that is a chart as well."""
    rows: list[tuple[str, ...]] = [HEAD]
    for load, simulation in found.curve:
        times = [value / 1e6 for value in (simulation.mean_latency_ns, simulation.latency_percentile_ns(99))]
        rows.append(
            (
                f"{load:.2f}", rate(load * found.rate_per_s), f"{100 * simulation.goodput:.1f} %", bar(simulation.goodput, 1, BAR),
                *("-" if value != value else f"{value:.3g}" for value in times), f"{simulation.mean_batch_size:.1f}", f"{100 * simulation.busy_share:.0f} %",
            )
        )  # fmt: skip
    return table(rows, ">>><>>>>")


def capacity(target: float, found: Recommendation) -> str:
    """In words."""
    if found.capacity_per_s is None:
        return f"capacity: none, fewer than {100 * target:g} % are in time at any rate"
    return f"capacity: {100 * target:g} % in time up to {rate(found.capacity_per_s)}"


def predicted(found: Recommendation) -> str:
    """In words."""
    simulation = found.predicted
    return (
        f"{100 * simulation.goodput:.1f} % in time; latency {span(simulation.mean_latency_ns / 1e9)} on average, "
        f"p99 {span(simulation.latency_percentile_ns(99) / 1e9)}; batches of {simulation.mean_batch_size:.1f}; device busy {100 * simulation.busy_share:.0f} %"
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments, for JSON."""
    return {"arguments": {name: value for name, value in vars(args).items() if name not in ("run", "json", "png", "profile_out")}}


def measures(profile: Profile, traffic: Traffic) -> dict[str, Any]:
    """The profile and the rate, for JSON."""
    return {"profile_ms": profile.medians_ms(), "noise": profile.noise, "rate_per_s": traffic.rate_per_s, "longest": traffic.longest}


def write(option: str, path: str, figures: Any) -> None:
    """JSON, to a file or to stdout."""
    text = json.dumps(figures, indent=2) + "\n"
    if path == "-":
        show(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CommandError(f"{option}: {error}") from None


def draw(args: argparse.Namespace, found: Recommendation) -> None:
    """The picture."""
    from gpuworker.tuning.charts import chart

    try:
        chart(found, args.latency_budget_ms, args.target, args.png)
    except ImportError:
        raise CommandError("--png needs matplotlib: pip install 'gpuworker[plot]'") from None
    except OSError as error:
        raise CommandError(f"--png: {error}") from None
