"""The router: one address in front of prefill and decode servers, or of unified ones.

run.py         route(): a socket, a fleet and an app, from their start to their end
app.py         its endpoints: /v1 passed on, its own /health and /metrics
proxy.py       one request: whom to ask, and whom then, if that fails
upstream.py    one try: a request to one server, its answer or how it was lost
eventline.py   a request whose answer comes in pieces, and those as they come
transcript.py  what a client has got of a stream, and what of a replay it has not
choose.py      the pair for a prompt, by prefix and load: a pure function
affinity.py    which server holds which page, as their events tell
fleet.py       the servers: health, load, what they are
metrics.py     what it counts                    config.py      RouterConfig

It talks HTTP, and to decode servers only: they fetch from the prefill servers that it names. It
knows no tokens and no pages but their keys.
"""
