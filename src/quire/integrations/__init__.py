"""Quire inside other engines. Importing this imports none of them."""
