"""The OpenAI-compatible server: HTTP and text on one side, one engine's token ids on the other.

run.py          serve(): a socket, an engine, a server, their start and their end
service.py      what every endpoint shares: engine, prompting, admission, metrics

A request, in the order in which it comes by:

api.py          /v1, /health, /ready, /metrics: what each path does; all paths as one app
incoming.py     who calls, and the JSON body
requests.py     what it may hold                    forms.py        fields of several forms
caching.py      what it may say of its pages
generation.py   admitted, made a prompt of, planned and run: gives pieces
planning.py     what is asked of the engine
answers.py      pieces → one JSON answer or events  formats.py      how a choice is written
responses/      /v1/responses, as a chat

telling.py      every answer, to log and spans      recorder.py     a trace of requests, for replay
admin.py        /admin                              openapi.py      /openapi.json
metrics.py      every figure                        notices.py      what an operator should hear of
config.py       ServerConfig

HTTP itself is in web/, and what a model reads and writes in text/.
"""
