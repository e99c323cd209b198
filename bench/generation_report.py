"""The tables and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from generation_runs import COMPARED, OURS, TRANSFORMERS, TRANSFORMERS_STATIC
from ipc.report import markdown, number, spread
from ipc.targets import Target

MOST_SLOTS = 64
VLLM = "vllm"


def per_s(record: dict[str, Any]) -> float:
    return float(record["tokens"] / record["seconds"])


def per_cpu_s(record: dict[str, Any]) -> float:
    return float(record["tokens"] / record["cpu_s"])


def ratios(records: Sequence[dict[str, Any]], rival: str, figure: Any) -> list[float]:
    """Ours to the rival's, within each round."""
    by_round = {(record["contestant"], record["round"]): record for record in records if "error" not in record}
    rounds = sorted({number for name, number in by_round if name == rival})
    return [figure(by_round[OURS, number]) / figure(by_round[rival, number]) for number in rounds]


def tables(records: dict[str, Any]) -> list[str]:
    """Of the parts that were measured."""
    makers = {"exact": _exact, "compare": _compare, "slots": _slots, "waste": _waste, "variance": _variance, "prefill": _prefill, "trace": _trace}
    return [maker(records[part]) for part, maker in makers.items() if records.get(part)]


def _exact(record: dict[str, Any]) -> str:
    return (
        f"float32: {record['same']} of {record['requests']} requests got, streamed together, the tokens that transformers generates for each alone."
    )


def _compare(records: list[dict[str, Any]]) -> str:
    rows = []
    for name in dict.fromkeys(record["contestant"] for record in records):
        own = [record for record in records if record["contestant"] == name]
        errors = [record["error"] for record in own if "error" in record]
        if errors:
            rows.append((name, f"n/a: {errors[0]}", *[""] * 6))
            continue
        raw = [record["raw_tokens"] / record["seconds"] for record in own if record["raw_tokens"]]
        wall, cpu = ratios(records, name, per_s), ratios(records, name, per_cpu_s)
        middle = [median(figure(record) for record in own) for figure in (per_s, per_cpu_s)]
        rows.append(
            (
                name,
                number(middle[0]),
                spread([per_s(record) for record in own]),
                number(median(raw)) if raw else "-",
                number(middle[1]),
                number(median(wall)),
                number(median(cpu)),
                spread(cpu),
            )
        )
    header = ("contestant", "useful tokens/s", "of rounds", "raw tokens/s", "tokens/CPU-s", "ours is x, wall", "ours is x, CPU", "of rounds")
    missing = "" if any(record["contestant"] == VLLM for record in records) else "\n\nvllm and llama.cpp take part where they are installed."
    return f"### The same requests, {COMPARED} slots, one thread, in turn\n\n{markdown(header, rows)}{missing}"


def _slots(records: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(r["slots"]),
            str(r["requests"]),
            number(per_s(r)),
            number(per_cpu_s(r)),
            number(r["step_ms"]),
            number(r["sequences"]),
            "-" if r["occupancy"] is None else f"{r['occupancy']:.0%}",
            f"{r['waste']:.1%}",
            str(r["preemptions"]),
            _pair(r["first_ms"]),
            _pair(r["between_ms"]),
            f"{r['own']:.1%}",
            number(r["own_us"]),
            f"{r['pack']:.1%}",
            f"{r['sample']:.1%}",
        )
        for r in records
    ]
    header = (
        "slots", "requests", "tokens/s", "tokens/CPU-s", "step ms", "sequences", "occupancy", "KV waste", "preemptions", "first ms p50/p99", "between ms p50/p99",
        "own", "own µs", "inputs", "sampler",
    )  # fmt: skip
    notes = (
        "All requests are sent at once: the first token's time is mostly waiting for a slot. Occupancy: of the slots, in steps while something waits. "
        "KV waste: of the places in used blocks; a sequence's last block is half empty on average, which is 8 tokens, so short ones waste more. "
        "Own: share of the owner's CPU time that is neither the model nor the sampler, making the model's inputs included; own µs: of the median step."
    )
    return f"### By slots\n\n{markdown(header, rows)}\n\n{notes}"


def _variance(records: list[dict[str, Any]]) -> str:
    rows = [
        (
            r["spread"],
            number(r["variation"]),
            number(per_s(r["ours"])),
            number(per_s(r["static"])),
            number(r["static"]["raw_tokens"] / r["static"]["seconds"]),
            number(gain(r)[0]),
            number(gain(r)[1]),
        )
        for r in records
    ]
    header = ("answers' lengths", "deviation / mean", "ours tokens/s", "static useful", "static raw", "gain, wall", "gain, CPU")
    return f"### Gain over static batches, by how much the lengths of answers differ (same mean)\n\n{markdown(header, rows)}"


def gain(record: dict[str, Any]) -> tuple[float, float]:
    """By the clock, and in CPU time."""
    ours, static = record["ours"], record["static"]
    return per_s(ours) / per_s(static), per_cpu_s(ours) / per_cpu_s(static)


def _prefill(r: dict[str, Any]) -> str:
    sides = (("without", "outside"), ("with", "inside"))
    rows = [(words, *_cells(r[side]), *_cells(r[f"step_{side}"])) for words, side in sides]
    ratios_of = [number(stall(r, of, quantile)) for of in ("", "step_") for quantile in ("p50", "p99")]
    rows.append(("ratio", *ratios_of))
    header = ("the prompt", "between tokens, ms p50", "p99", "the owner's step, CPU ms p50", "p99")
    first_s, stalls = median(r["prefill_ms"]) / 1e3, ", ".join(number(value) for value in r["stalls"]) or "-"
    notes = (
        f"p99 with / without in each round: {stalls}. {r['gaps']:,} gaps a side, between the same tokens of the same "
        f"{r['rows']} answers. The prompt's first token came after {number(first_s)} s; with nobody beside, after {number(median(r['alone_ms']) / 1e3)} s."
    )
    return f"### Time between tokens while a prompt of {r['long_tokens']:,} tokens is computed\n\n{markdown(header, rows)}\n\n{notes}"


def _cells(found: dict[str, float] | None) -> tuple[str, str]:
    return (number(found["p50"]), number(found["p99"])) if found else ("-", "-")


def stall(record: dict[str, Any], of: str = "", quantile: str = "p99") -> float | None:
    """Of the time between tokens, meanwhile / without. of: "step_" for the CPU time of the steps instead."""
    inside, outside = record[f"{of}inside"], record[f"{of}outside"]
    return float(inside[quantile] / outside[quantile]) if inside and outside else None


def _waste(records: list[dict[str, Any]]) -> str:
    rows = [(f"{r['least']} to {r['most']:,}", str(r["requests"]), number(r["tokens"]), f"{r['waste']:.1%}") for r in records]
    header = ("tokens of a prompt, and of an answer", "requests", "tokens of both, in the mean", "KV waste")
    note = "A sequence's last block of 16 tokens is half empty on average, whatever its length. The scheduler alone, without a model."
    return f"### KV waste by length, {COMPARED} slots\n\n{markdown(header, rows)}\n\n{note}"


def _trace(records: list[dict[str, Any]]) -> str:
    rows = [
        (
            number(r["load"]),
            number(r["per_s"]),
            number(per_s(r)),
            _pair(r["first_ms"]),
            _pair(r["between_ms"]),
            number(r["sequences"]),
            f"{r['waste']:.1%}",
        )
        for r in records
    ]
    header = ("load", "requests/s", "tokens/s", "first ms p50/p99", "between ms p50/p99", "sequences", "KV waste")
    return (
        f"### A trace's requests, as they came\n\n{markdown(header, rows)}\n\nLoad 1: the rate at which they are finished when all are there at once."
    )


def targets(records: dict[str, Any]) -> list[Target]:
    """What the project set out to reach, as far as this run has measured it."""
    compared, slots = records.get("compare") or [], {record["slots"]: record for record in records.get("slots") or []}
    foreign = max([record["foreign_cores"] for record in compared if "foreign_cores" in record], default=None)
    found = []
    for rival, limit in ((TRANSFORMERS_STATIC, 2.0), (TRANSFORMERS, 1.7), (VLLM, 0.9)):
        for words, figure in (("tokens/CPU-s", per_cpu_s), ("tokens/s", per_s)):
            measured = ratios(compared, rival, figure)
            found.append(Target(f"{words}, ours / {rival}, {COMPARED} slots", ">=", limit, median(measured) if measured else None, foreign))
    most = slots.get(MOST_SLOTS)
    found.append(Target(f"scheduler and bookkeeping, % of a step, {MOST_SLOTS} slots", "<=", 5.0, 100 * most["own"] if most else None))
    at = slots.get(COMPARED)
    found.append(Target(f"KV waste, % of used blocks, {COMPARED} slots", "<=", 4.0, 100 * at["waste"] if at else None))
    for r in records.get("waste") or []:
        found.append(Target(f"KV waste, % of used blocks, {r['least']} to {r['most']:,} tokens", "<=", 4.0, 100 * r["waste"]))
    prefill = records.get("prefill")
    for words, of in (("time between tokens", ""), ("CPU time of a step", "step_")):
        found.append(Target(f"{words} p99, with a long prompt / without", "<=", 2.0, stall(prefill, of) if prefill else None))
    exact = records.get("exact")
    found.append(Target("float32: % of requests token-exact", ">=", 100.0, 100 * exact["same"] / exact["requests"] if exact else None))
    return found


def _pair(found: dict[str, float] | None) -> str:
    return f"{number(found['p50'])} / {number(found['p99'])}" if found else "-"
