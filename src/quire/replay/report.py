"""What a replay found, as tables. Knows the shape of sweep.py's result, computes nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from quire.replay.profile import Profile
from quire.sizes import format_bytes

Result = dict[str, Any]


def tables(result: Result) -> list[RenderableType]:
    has_ttft = result["profile"] is not None
    table = Table(
        title=f"Share of the prompts' blocks found, by size of the {result['varied']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    names = [result["varied"], "device", "host", "store", "all", "ideal LRU", "of it", "Belady"]
    if has_ttft:
        names += ["TTFT", "p95"]
    for name in (*names, "next GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result["points"]:
        tiers = [_percent(point["hit_by_tier"][name]) for name in ("device", "host", "store")]
        cells = [format_bytes(point["bytes"]), *tiers, f"[bold]{_percent(point['hit'])}[/]"]
        cells += [_percent(point["ideal_lru"]), f"{point['of_ideal']:.3f}"]
        cells.append(_percent(point["belady"]))
        if has_ttft:
            cells += [_seconds(point["ttft_s"]["mean"]), _seconds(point["ttft_s"]["p95"])]
        table.add_row(*cells, _next(point["next_gib"]))
    return [_about(result), table, *_notes(result)]


def profile_table(profile: Profile) -> Table:
    table = Table(title="This machine", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how fast", justify="right", no_wrap=True)
    table.add_row("model", escape(f"{profile.model}, {profile.dtype} on {profile.device}"))
    table.add_row("KV cache of a token", format_bytes(profile.bytes_per_token))
    table.add_row("first token of a prompt on the device", _seconds(profile.fixed_s))
    for num_tokens in (1024, profile.longest_tokens):
        seconds = profile.ttft_s(num_tokens, 0, 0, 0)
        table.add_row(f"… of {num_tokens:,} new tokens", _seconds(seconds))
    table.add_row("host to device", f"{format_bytes(profile.host_bytes_per_s)}/s")
    table.add_row("store to host", f"{format_bytes(profile.store_bytes_per_s)}/s")
    return table


def _about(result: Result) -> str:
    trace, page = result["trace"], result["page_bytes"]
    parts = [
        f"{escape(trace['name'])}: {trace['requests']:,} requests in "
        f"{trace['seconds'] / 60:.0f} min, {trace['asked_pages']:,} blocks of "
        f"{trace['block_tokens']} tokens, {trace['distinct_pages']:,} of them different "
        f"({format_bytes(trace['distinct_pages'] * page)})",
    ]
    sizes = [
        f"{name} {format_bytes(result[f'{name}_pages'] * page)}"
        for name in ("device", "host", "store")
        if name != result["varied"]
    ]
    use = f"{result['in_use']:.0%} of the device in use"
    if result["burst"]:
        use += f", {result['burst']:.0%} in a burst"
    parts.append(f"{', '.join(sizes)}, {use}, {result['write_policy']}")
    return "\n".join(parts)


def _notes(result: Result) -> list[str]:
    notes = [
        f"[bold]{result['advice']}[/]; a cache without limits would find "
        f"{_percent(result['unlimited'])}."
    ]
    cut = max(point["cut_requests"] for point in result["points"])
    if cut:
        notes.append(
            f"Up to {cut:,} requests did not fit on the device beside what was in use: they count "
            "as computed, and only in part as cached. The bounds are cut as they are."
        )
    if result["profile"] is None:
        notes.append("For times to the first token, measure a machine first: quire profile.")
    else:
        busy = [f"{point['ttft_s']['machines']:.1f}" for point in result["points"]]
        notes.append(
            f"First tokens alone keep {', '.join(busy)} such machines busy; times are without "
            "queueing."
        )
        if guessed := result["points"][0]["ttft_s"]["guessed"]:
            longest = result["profile"]["longest_tokens"]
            notes.append(
                f"{guessed:.0%} of the prompts are longer than the {longest:,} tokens measured: "
                "their times are extrapolated."
            )
    return notes


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _next(slope: Result | None) -> str:
    if slope is None:
        return "–"
    text = f"{slope['hit'] * 100:+.3f} %"
    return text if slope["saved_s"] is None else f"{text}, {-slope['saved_s'] * 1000:+.2f} ms"
