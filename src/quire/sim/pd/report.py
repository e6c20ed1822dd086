"""PdReport: what a simulated cluster did."""

from __future__ import annotations

from dataclasses import dataclass

from quire.sim.pd.options import SimPdOptions, Topology


@dataclass(frozen=True, slots=True)
class PdReport:
    seed: int
    steps: int
    options: SimPdOptions
    virtual_s: float
    digest: str
    """Of all commands, reports and messages: equal runs have equal digests."""
    counters: dict[str, int]

    def rows(self) -> list[tuple[str, str]]:
        """(what, figure) for a table."""
        options, count = self.options, self.counters
        if options.topology is Topology.PD:
            who = (
                f"{options.prefills} prefill ({options.prefill_ranks} ranks), "
                f"{options.decodes} decode ({options.decode_ranks} ranks)"
            )
        else:
            who = f"{options.decodes} unified ({options.decode_ranks} ranks)"
        repairs = {k.removeprefix("repair "): n for k, n in count.items() if k[:7] == "repair "}
        aborted = sum(n for name, n in count.items() if name.startswith("aborted while"))
        return [
            ("engines", f"{who}, components {options.mix.value}"),
            ("steps", f"{self.steps:,}"),
            ("virtual time", f"{self.virtual_s:,.1f} s"),
            ("answered", f"{count.get('finish length', 0):,} of {count.get('arrived', 0):,}"),
            ("of these after a failure", f"{count.get('finished after a failure', 0):,}"),
            ("aborted", f"{aborted:,}"),
            ("engines killed", f"{count.get('killed', 0):,}"),
            ("hand-overs served", f"{count.get('served', 0):,}"),
            ("pages received", f"{count.get('received_pages', 0):,}"),
            ("pages repaired", ", ".join(f"{k} {n:,}" for k, n in sorted(repairs.items())) or "-"),
            ("all local", f"{count.get('handover all local', 0):,}"),
            ("pages checked", f"{count.get('checked pages', 0):,}"),
            ("trace", self.digest),
        ]
