"""Answers that several ask for: made once for those whom an older one will do."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from quire.web.glances import AGE_HEADER, SharedAnswers

LATER = {"cache-control": "max-age=1"}


class Counting:
    """A server that counts what it had to make, at a time that a test says."""

    def __init__(self):
        self.now_s, self.made, self.go_on = 100.0, 0, asyncio.Event()
        self.go_on.set()
        shared, app = SharedAnswers(lambda: self.now_s), FastAPI()

        async def make() -> bytes:
            self.made += 1
            number = self.made
            await self.go_on.wait()
            if number == 13:
                raise ValueError
            return str(number).encode()

        @app.get("/figures")
        async def figures(request: Request) -> Response:
            return await shared.get(request, make, "text/plain")

        transport = httpx.ASGITransport(app=app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def ask(self, headers=None, query=""):
        return await self.client.get(f"/figures{query}", headers=headers)


def test_who_says_nothing_is_told_what_is_now():
    async def run():
        server = Counting()
        return [(await server.ask()).text for _ in range(3)]

    assert asyncio.run(run()) == ["1", "2", "3"]


def test_ten_who_look_together_cost_what_one_costs():
    async def run():
        server = Counting()
        server.go_on.clear()
        asked = [asyncio.create_task(server.ask(LATER)) for _ in range(10)]
        while not server.made:
            await asyncio.sleep(0)
        server.go_on.set()
        return {(await each).text for each in asked}, server.made

    assert asyncio.run(run()) == ({"1"}, 1)


def test_an_answer_is_no_older_than_was_asked_for_and_says_how_old():
    async def run():
        server, told = Counting(), []
        for wait_s in (0.0, 0.75, 0.5):
            server.now_s += wait_s
            answer = await server.ask(LATER)
            told.append((answer.text, answer.headers[AGE_HEADER]))
        return told

    assert asyncio.run(run()) == [("1", "0.000"), ("1", "0.750"), ("2", "0.000")]


def test_another_question_has_another_answer():
    async def run():
        server = Counting()
        return [(await server.ask(LATER, query)).text for query in ("?limit=1", "?limit=2")]

    assert asyncio.run(run()) == ["1", "2"]


def test_what_failed_is_made_again():
    async def run():
        server = Counting()
        server.made = 12
        with pytest.raises(ValueError):
            await server.ask(LATER)
        return (await server.ask(LATER)).text

    assert asyncio.run(run()) == "14"


def test_who_goes_away_takes_it_from_nobody():
    async def run():
        server = Counting()
        server.go_on.clear()
        first, second = (asyncio.create_task(server.ask(LATER)) for _ in range(2))
        while not server.made:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        server.go_on.set()
        return (await second).text

    assert asyncio.run(run()) == "1"
