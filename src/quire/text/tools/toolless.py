"""Tools for models whose template knows none: described, called and answered in plain messages.

In Hermes's form, which hermes.py reads: most models have seen it. Given messages as a template
takes them, with all text clean.
"""

from __future__ import annotations

import json
from typing import Any

from quire.text.tools.hermes import CLOSING, OPENING

RESULT_MARKS = ("<tool_response>", "</tool_response>", "<tools>", "</tools>")

_INSTRUCTIONS = """\
# Tools

You can call functions. Each line between these tags describes one, as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags:
{opening}
{{"name": "a function", "arguments": {{"an argument": "its value"}}}}
{closing}
Write one such block for each call, then stop. What the functions return comes back to you between \
<tool_response> and </tool_response>."""


def described(messages: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    """With the tools in the system message, which comes first."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, opening=OPENING, closing=CLOSING)
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def told(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With calls and results as text. Results that follow each other are one turn."""
    found: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            blocks = [_written(call["function"]) for call in message["tool_calls"]]
            content = "\n".join([*([message["content"]] if message["content"] else []), *blocks])
            found.append({"role": message["role"], "content": content})
        else:
            found.append(message)
        was_result = is_result
    return found


def _written(function: dict[str, Any]) -> str:
    """As models are asked to write it, with the arguments as they were written."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{OPENING}\n{{"name": {name}, "arguments": {function["arguments"]}}}\n{CLOSING}'
