"""`quire bench speculate`: what proposing tokens ahead saves, by way and workload.

prompt_lines.py (what is asked), imposed.py (random models, and an acceptance that is said, not
found), run.py (the measuring), report.py (tables).
"""
