"""/v1/responses: OpenAI's newer form of a chat. Text, functions and streams; nothing else of it.

    fields.py      what a request may hold           items.py        its items → messages of a chat
    output.py      an answer's items as they grow    remembered.py   what previous_response_id names
    answering.py   a request as a chat, and what the chat says in this form

A request becomes a ChatRequest, so prompts, parsers and limits are those of /v1/chat/completions.
"""
