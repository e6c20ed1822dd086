"""`quire bench ttft`: what a hit in each tier saves.

run.py          the benchmark: one prompt computed, then found in each tier
warm_server.py  a server that is started for a measurement, and what is asked of it
report.py       tables
"""
