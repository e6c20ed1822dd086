"""`quire bench serve`: multi-turn sessions against a running server.

run.py            the benchmark: sessions in a closed loop, progress, one result
conversations.py  the sessions: made up, of real agents, of questions in two turns
chatting.py       one request over HTTP: when each token came, what was found in which tier
figures.py        from requests to figures, by round and in all
report.py         tables
plots.py          pictures
"""
