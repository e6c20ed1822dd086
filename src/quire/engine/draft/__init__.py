"""Drafts: tokens proposed before the model has computed them, for it to check several at once.

ngram.py looks them up in the request's own text; eagle.py computes them with a small head, read by
weights.py and made by training/; adaptive.py decides how many are worth proposing. Importing this
imports no torch.
"""
