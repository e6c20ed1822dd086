"""`quire bench ttft`: what a hit in each tier saves, and what the tiers cost when nothing hits.

run.py          the benchmark: its own servers, both parts, one result
hits.py         one prompt computed, then found in each tier
overhead.py     unique prompts, with and without the lower tiers, in turns
prompts.py      text of so many tokens
adminclient.py  its admin API
report.py       tables
"""
