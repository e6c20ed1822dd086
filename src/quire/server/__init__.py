"""The OpenAI-compatible server: HTTP and text on one side, one engine's token ids on the other.

run.py          serve(): a socket, an engine, a server, their start and their end
app.py          create_app(): routes and guards put together
service.py      what every endpoint shares: engine, prompting, admission, metrics

A request, in the order in which it comes by:

api.py          /v1, /health, /ready, /metrics: what each path does
callers.py      who calls                           bodies.py       a JSON body, read
requests.py     what it may hold                    forms.py        fields of several forms
caching.py      what it may say of its pages
running.py      admitted, made a prompt of, planned and run: gives pieces
planning.py     what is asked of the engine         generation.py   its tokens → pieces, per choice
answers.py      pieces → one JSON answer or events  formats.py      how a choice is written
responses/      /v1/responses, as a chat

answered.py     told of every answer: log, spans    recorder.py     a trace of requests, for replay
admin.py        /admin                              openapi.py      /openapi.json
metrics.py      every figure                        notices.py      what an operator should hear of
config.py       ServerConfig

HTTP itself is in web/, and what a model reads and writes in text/.
"""
