"""The OpenAI-compatible server: HTTP and text on one side, one engine's token ids on the other.

run.py          serve(): a socket, an engine, a server, their start and their end
app.py          create_app(): routes, guards and error answers put together
api.py          /v1, /health, /ready, /metrics      admin.py        /admin
service.py      what every endpoint shares: engine, prompting, admission, metrics

bodies.py       a JSON body, read and described     protocol.py     what it may hold
messages.py     messages, tools, calls              forms.py        fields of several forms
prompting.py    prompts → token ids                 templates.py    chats → text, for it
special.py      clients' text is only text          sampling.py     parameters for the engine
generation.py   one request's choices               scribe.py       their tokens → pieces
vocabulary.py   token ids → bytes
text.py         → text, stop strings                reading.py      … read by a parser of tools/
generation_config.py   what a model's makers say of sampling
chat.py, completions.py   what differs between the two endpoints
responses/      /v1/responses, as a chat            tools/          calls and reasoning in answers
unknown.py      fields that nobody knows
answers.py      pieces → one JSON answer or events  usage.py        the usage object

connections.py  slow heads, slow readers, too many connections, junk
guards.py       body size and time; the boundary where every failure becomes an answer
streams.py      answers that watch whether anybody is still there
security.py     keys, the admin's door              errors.py       every error answer
addresses.py    page servers' addresses, as written
metrics.py      every figure, and their reference   config.py       ServerConfig
"""
