"""Findings: what the runs of a swarm found, in files, so that no seed is lost with its process.

    begun ──▶ NAME.running ──ended well──▶ gone
                   └────────failed───────▶ NAME.failed

Each run's own process writes them: nobody else need be alive. What is still NAME.running when
nobody runs any more was under way when the swarm was stopped. Knows names and commands; no
simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Findings:
    folder: Path

    def begin(self, name: str, command: str) -> None:
        """`command`: what repeats the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running(name).write_text(f"{command}\n")

    def end(self, name: str, command: str, error: str) -> None:
        """`error`: empty if it ended well. It may be told twice."""
        if error:
            path = self.folder / f"{name}.failed"
            path.write_text(f"{command}\n\n{error}\n")
        self._running(name).unlink(missing_ok=True)

    def under_way(self) -> list[str]:
        """Commands of runs that have not ended."""
        return [path.read_text().strip() for path in sorted(self.folder.glob("*.running"))]

    def _running(self, name: str) -> Path:
        return self.folder / f"{name}.running"
