"""`quire bench gpu`: the engine beside what the hardware could do.

plan.py (what is measured), random_model.py (random weights of a real shape), floors.py (what the
machine does at best), rig.py and driving.py (engines in this process), times.py (decoding, prompts,
hits), crossover.py (computing, fetching, both), copying.py (between device and host, over
bench/link.py), sets.py (sessions that come back), run.py, report.py, plots.py.
"""
