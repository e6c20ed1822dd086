"""Simulation: the real manager over simulated workers, in virtual time, repeatable by seed."""

from quire.sim.options import ComponentMix, SimOptions, UnitMix
from quire.sim.report import SimReport, SimulationError, Tally
from quire.sim.run import Simulation, simulate

__all__ = [
    "ComponentMix",
    "SimOptions",
    "SimReport",
    "Simulation",
    "SimulationError",
    "Tally",
    "UnitMix",
    "simulate",
]
