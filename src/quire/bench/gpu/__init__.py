"""`quire bench gpu`: the engine beside what the hardware could do.

plan.py (what is measured), model.py (random weights of a real shape), floors.py (what the machine
does at best), rig.py and drive.py (engines in this process), latency.py (decoding, prompts, hits),
crossover.py (computing, fetching, both), link.py and copies.py (between device and host), sets.py
(sessions that come back), run.py, report.py, plots.py.
"""
