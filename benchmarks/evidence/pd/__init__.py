"""`quire bench pd`: turns of long conversations on a prefill and a decode engine of one device.

plan.py says what is asked, fleet.py starts the engines, rounds.py asks, figures.py sums up.
"""
