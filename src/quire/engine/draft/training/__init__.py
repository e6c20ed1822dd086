"""Training an EAGLE-3 head for a model: `quire train-eagle`.

texts.py (files → passages and questions), continuations.py (what the model itself says), collect.py
(what is learned from, and measured on), examples.py (token sequences; batches in an order by seed),
target.py (the model's features and choices), start.py (a head to begin with), unroll.py (the head,
fed with its own output over several steps), trainer.py (the loop, resumable), acceptance.py (how
many proposals are accepted), run.py (all of it), plots.py.
"""
