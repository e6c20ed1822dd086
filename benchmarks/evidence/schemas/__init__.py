"""Answers under schemas: are they valid, and what does it cost? `quire bench schemas`.

cases.py makes random schemas and knows what follows them; valid.py asks for an answer to each;
costs.py measures; run.py does both with an engine of its own, one after the other.
"""
