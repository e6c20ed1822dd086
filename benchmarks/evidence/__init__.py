"""Benchmarks that stand behind one claim of the documents each, for whoever wants to check it.

They are commands like the rest (`quire bench pd`, …) in a checkout, and not in the package: what
users measure their own machines with is in `quire.bench`.

disagg/   prefill and decode apart: what a decode-side cache saves; a store that stalls; restores
pd/       long conversations over each transport, on one device
overhead/ what host and store cost when nothing is reused
hybrid/   models with recurrent layers or windows: what a hit saves, what snapshots cost
schemas/  answers held to schemas: valid? At what cost?
"""
