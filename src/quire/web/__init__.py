"""HTTP as a server and a router both need it. Below both; knows no model, no engine and no prompt.

config.py       WebConfig: where to listen, and how patient to be
listening.py    a socket, a server on it, and how it is told to stop
connections.py  slow heads, slow readers, too many connections, junk
guards.py       body size and time; the boundary where every failure becomes an answer
sending.py      answers that watch whether anybody is still there
errors.py       every error answer                  metrics.py      what a metric is
security.py     keys, the admin's door              keyfile.py      an admin key in a file
glances.py      answers made once for all who look
routes.py       what routers and servers say to each other
addresses.py    page servers' addresses, as written
traced.py       spans of requests                   ui/             a page for a person
"""
