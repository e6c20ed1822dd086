"""What `quire top` shows of what it saw of a server or a router. Pure: no sockets, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quire.cli.toplooks import TIERS, History, Look, MetricsRead
from quire.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

_WIDTH = 28
_TALL = 6
"""Rows of the chart of hits."""
_MOST_REQUESTS = 8
_MOST_BRANCHES = 8
_TREE_WIDTH = 72
_TREE_WORDS = 36
_COMPUTED = "computed"
_TROUBLES = {
    "error": "calls that failed",
    "declined": "calls not made",
    "read": "pages not read",
    "written": "pages not written",
    "mismatch": "pages that were wrong",
}
"""By what the store's client counts."""
_WELL = ("ok", "miss", "cancelled")
# Marks as well as colours: a terminal without them, or a file, shows the same.
_MARKS = {
    "device": ("█", "blue"),
    "host": ("▓", "green"),
    "store": ("▒", "yellow"),
    "peer": ("░", "magenta"),
    _COMPUTED: ("·", "bright_black"),
}


def shown(url: str, look: Look, history: History) -> RenderableType:
    """`history`: of the looks before it and itself."""
    from rich.console import Group

    title = f"[bold]{escape(url)}[/bold]"
    if look.members is not None:
        routed = _routed(look.metrics, look.members)
        return Group(f"{title}   a router", "", _members(look.members), "", *routed)
    now = look.metrics
    return Group(
        f"{title}   {_in_flight(look)}"
        + ("" if now.sum("quire_engine_up") else "   [red]THE ENGINE IS GONE[/red]"),
        "",
        _tiers(now),
        "",
        _found(history),
        *_chart(history),
        *_speeds(history),
        _store(now),
        *_handovers(now),
        *_requests(look.requests),
        *_tree(look.tree),
    )


def _in_flight(look: Look) -> str:
    """As the table of requests says, if there is one: figures are of another moment."""
    if look.requests is not None:
        states = sorted(Counter(each["state"] for each in look.requests).items())
        return ", ".join(f"{count} {state}" for state, count in states) or "no requests"
    counts = (look.metrics.sum(f"quire_{what}_requests") for what in ("running", "waiting"))
    return "{:.0f} running, {:.0f} waiting".format(*counts)


def _members(members: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table(
        "server", "kind", "state", "model", "running", "waiting", folded=("state", "model")
    )
    for each in members:
        state = f"{each['state']}: {each['reason']}" if each.get("reason") else each["state"]
        counts = (str(each[name]) for name in ("running", "waiting"))
        _add(table, each["url"], each["side"], state, each["model"], *counts)
    return table


def _routed(now: MetricsRead, members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Clients' requests: who looks here asks as well."""
    under_way = sum(each["in_flight"] for each in members if each["side"] != "prefill")
    rows = now.rows("quire_router_requests_total")
    asked = [(each["status"], count) for each, count in rows if each["endpoint"].startswith("/v1/")]
    answered = sum(count for _, count in asked)
    failed = sum(count for status, count in asked if status >= "500")
    chosen, known = "quire_router_choices_total", {"by": "affinity"}
    return [
        f"Requests: {under_way} under way, {answered:,.0f} answered, {failed:,.0f} of them failed "
        "(5xx)",
        f"Servers chosen for what they have cached: {now.sum(chosen, **known):,.0f} "
        f"of {now.sum(chosen):,.0f}",
        f"Tries that another server could make good: {now.sum('quire_router_retries_total'):,.0f}; "
        f"streams that lost their server: {now.sum('quire_router_failovers_total'):,.0f}",
    ]


def _tiers(now: MetricsRead) -> RenderableType:
    table = _table("tier", "", "used", "of", "in use now")
    for labels, size in now.rows("quire_tier_bytes"):
        if not size:
            continue
        used = now.sum("quire_tier_used_bytes", **labels)
        locked = now.sum("quire_tier_locked_bytes", **labels)
        full = round(_WIDTH * used / size)
        name = labels["tier"] + ("" if labels["component"] == "full" else f" {labels['component']}")
        bar = "█" * full + "░" * (_WIDTH - full)
        table.add_row(name, bar, *(format_bytes(int(each)) for each in (used, size, locked)))
    return table


def _found(history: History) -> str:
    last = history.last
    parts = [
        f"{tier} {100 * last.found[tier] / last.prompt:.0f} %" if last.prompt else f"{tier} –"
        for tier in TIERS
    ]
    since = "since the last look" if history.intervals else "since the start"
    return f"Prompt tokens {since}: {last.prompt:,.0f}, found on " + ", ".join(parts)


def _chart(history: History) -> list[Text]:
    """A column for every look, the latest on the right: where its prompt tokens were found."""
    from rich.text import Text

    top = max((each.prompt / each.seconds for each in history.intervals), default=0.0)
    if not top:
        return []
    columns = []
    for each in history.intervals:
        column: list[str] = []
        counts = {**each.found, _COMPUTED: each.prompt - sum(each.found.values())}
        for tier, count in counts.items():
            column += [tier] * round(_TALL * count / each.seconds / top)
        columns.append(column)
    rows = [Text(f"up to {top:,.0f} tokens/s   ").append_text(_legend())]
    for height in reversed(range(_TALL)):
        row = Text()
        for column in columns:
            row.append(*(_MARKS[column[height]] if height < len(column) else (" ",)))
        rows.append(row)
    return rows


def _legend() -> Text:
    from rich.text import Text

    text = Text()
    for name, (mark, colour) in _MARKS.items():
        text.append(mark, colour).append(f" {name}  ")
    return text


def _speeds(history: History) -> list[str]:
    last = history.last
    first = "–"
    if last.firsts:
        first = f"{last.first_s:.3f} s"
        if history.speed:
            first += (
                f", without the cache about {last.without_s(history.speed):.3f} s "
                f"(estimated, at {history.speed:,.0f} tokens/s computed)"
            )
    speed = f" ({last.said / last.seconds:,.1f}/s)" if history.intervals else ""
    return [
        f"Time to first token, mean of {last.firsts:.0f}: {first}",
        f"Tokens said: {last.said:,.0f}{speed}",
    ]


def _store(now: MetricsRead) -> str:
    if not now.sum("quire_store_attached"):
        return "Store: none"
    events = {labels["event"]: value for labels, value in now.rows("quire_store_events_total")}
    health = _health(now)
    if opened := events.get("breaker_opened"):
        health += f" (the breaker has opened {_times(int(opened))})"
    read_pages, written = events.get("read:ok", 0), events.get("written:ok", 0)
    rest = "".join(f"; {trouble}" for trouble in _troubles(events)) + _fill(now)
    return f"Store: {health}, {read_pages:,.0f} pages read, {written:,.0f} written{rest}"


def _troubles(events: Mapping[str, float]) -> list[str]:
    """What went wrong so far, in words; /ui says it in the same."""
    found: dict[str, list[str]] = {}
    for name, count in sorted(events.items()):
        kind, _, what = name.partition(":")
        if count and kind in _TROUBLES and what not in _WELL:
            found.setdefault(_TROUBLES[kind], []).append(f"{count:,.0f} {what.replace('_', ' ')}")
    return [f"{trouble}: {', '.join(each)}" for trouble, each in found.items()]


def _health(now: MetricsRead) -> str:
    """Of one store, or of several, by number."""
    rows = now.rows("quire_store_answers")
    silent = [labels["store"] for labels, answers in rows if not answers]
    if not silent:
        return "answers"
    which = f"{', '.join(silent)} of {len(rows)} " if len(rows) > 1 else ""
    return f"[red]{which}does not answer[/red]"


def _fill(now: MetricsRead) -> str:
    """Of stores with a budget of their own."""
    found: dict[str, dict[str, float]] = {}
    for labels, value in now.rows("quire_store_bytes"):
        found.setdefault(labels["store"], {})[labels["what"]] = value
    sizes = [(int(each.get("used", 0)), int(each.get("max", 0))) for each in found.values()]
    return "".join(
        f"; {format_bytes(used)} of {format_bytes(most)}" for used, most in sizes if most
    )


def _handovers(now: MetricsRead) -> list[str]:
    if not now.rows("quire_handovers_total"):
        return []
    count = now.sum("quire_handovers_total")
    each = 1000 * now.sum("quire_handover_seconds_total") / count if count else 0.0
    opened = now.sum("quire_handovers_open")
    received, sent = (
        format_bytes(int(now.sum("quire_handover_bytes_total", direction=direction)))
        for direction in ("received", "sent")
    )
    peers = [f"{labels['peer']} {labels['state']}" for labels, _ in now.rows("quire_peer_link")]
    return [
        f"Hand-overs: {opened:.0f} open, {count:,.0f} received, {each:.0f} ms each; "
        f"{received} in, {sent} out",
        *([escape("Peers: " + "; ".join(peers))] if peers else []),
    ]


def _requests(requests: Sequence[Mapping[str, Any]] | None) -> list[RenderableType]:
    if not requests:
        return []
    table = _table("request", "state", "prompt", "answer", "age")
    for each in requests[:_MOST_REQUESTS]:
        lengths = (str(each["prompt_tokens"]), str(each["output_tokens"]))
        _add(table, each["id"], each["state"], *lengths, f"{each['age_s']:.1f} s")
    more = len(requests) - _MOST_REQUESTS
    return ["", table, *([f"and {more} more"] if more > 0 else [])]


def _tree(tree: Mapping[str, Any] | None) -> list[RenderableType]:
    """Along: where in the prompt. Down: a row for every branch, from where it begins."""
    if tree is None or not tree["runs"]:
        return []
    runs = [dict(zip(tree["fields"], run, strict=True)) for run in tree["runs"]]
    branches = _branches(runs)
    about = (
        f"The prefix tree: {len(runs):,} runs of pages on {len(branches):,} branches, "
        f"{tree['page_size']} tokens per page"
    )
    picture = _TreePicture(branches[:_MOST_BRANCHES], max(run["last"] for run in runs))
    more = len(branches) - _MOST_BRANCHES
    return ["", about, picture, *([f"and {more} more"] if more > 0 else [])]


@dataclass(frozen=True, slots=True)
class _TreePicture:
    """As wide as there is room for beside its words."""

    branches: Sequence[Sequence[Mapping[str, Any]]]
    longest: int
    """Pages of the longest prompt."""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = min(_TREE_WIDTH, max(_WIDTH, options.max_width - _TREE_WORDS))
        for branch in self.branches:
            yield _branch(branch, width / self.longest)


def _branches(runs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Every run once; of those that leave one place, the one used last comes first."""
    below: dict[int, list[int]] = {}
    for number in sorted(range(len(runs)), key=lambda number: runs[number]["age"]):
        below.setdefault(runs[number]["parent"], []).append(number)
    found: list[list[dict[str, Any]]] = []
    waiting = [(number, True) for number in reversed(below[-1])]
    while waiting:
        number, begins = waiting.pop()
        if begins:
            found.append([])
        found[-1].append(runs[number])
        children = below.get(number, [])
        waiting += reversed([(child, i > 0) for i, child in enumerate(children)])
    return found


def _branch(branch: Sequence[Mapping[str, Any]], scale: float) -> Text:
    from rich.text import Text

    indent = " " * round(branch[0]["first"] * scale)
    row = Text(indent, no_wrap=True, overflow="ellipsis")
    for run in branch:
        tier = next((each for each in ("device", "host", "store") if run[each]), _COMPUTED)
        mark, colour = _MARKS[tier]
        row.append(mark * (round(run["last"] * scale) - round(run["first"] * scale)), colour)
    row.append(f"  {branch[-1]['last']} pages, used {_times(branch[0]['hits'])}")
    return row.append(f" by {tenant}" if (tenant := branch[0]["tenant"]) else "")


def _times(count: int) -> str:
    return f"{count:,} time{'' if count == 1 else 's'}"


def _table(*columns: str, folded: Sequence[str] = ()) -> Table:
    """`folded`: what takes more lines where there is no room, so that the rest is whole."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name not in folded, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of what others say: `[::1]` is no markup."""
    table.add_row(*map(escape, cells))
