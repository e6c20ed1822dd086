"""What a model reads and writes, as text: conversations → token ids, token ids → text and calls.

messages.py     messages, tools, calls              shapes.py       strict shapes of JSON
prompting.py    prompts → token ids                 templates.py    chats → text, for it
special.py      clients' text is only text          generation_config.py   what a model's makers say
vocabulary.py   token ids → bytes                   decoding.py     → text, stop strings
reading.py      … read by a parser of tools/        scribe.py       one answer's tokens → pieces
grammars.py     what an answer must follow          tools/          calls and reasoning in answers

No HTTP, and no engine but its messages.
"""
