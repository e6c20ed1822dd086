"""Capacity planning: a trace of requests through the real manager, in virtual time."""
