"""Prefill, decode and peers in simulation: real engines over simulated hands and lines."""
