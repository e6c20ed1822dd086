"""`quire bench hybrid`: models with recurrent layers or windows, through all tiers.

run.py       the benchmark: engines in this process, both parts, one result
hits.py      one prompt computed, then found in each tier
overhead.py  unique prompts, with and without snapshots, in turns
model.py     a model of random weights
report.py    tables
"""
