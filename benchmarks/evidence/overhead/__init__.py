"""`quire bench overhead`: what host and store cost when nothing is ever reused.

run.py     the benchmark: two servers, one with the lower tiers and one without, in turns
report.py  tables
"""
