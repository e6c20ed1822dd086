"""`quire bench gpu`: the engine beside what the hardware could do.

model.py (random weights of a real shape), floors.py (what the machine does at best), drive.py (an
engine in this process), run.py (the measurements), report.py.
"""
