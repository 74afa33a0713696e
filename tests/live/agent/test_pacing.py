"""How often an agent exchanges: once a hold while nothing happens, and at once with news."""

import asyncio

from carpool.live.agent.pacing import PAUSE_S, exchange_for_ever


class HoldingService:
    """Holds every exchange until a later one overtakes it."""

    def __init__(self):
        self.held = []
        self.count = 0

    async def exchange(self):
        self.count += 1
        for earlier in self.held:
            earlier.set()
        mine = asyncio.Event()
        self.held.append(mine)
        await mine.wait()

    async def rest(self):
        """Wait for as long as several exchanges would take that follow each other without a reason."""
        await asyncio.sleep(10 * PAUSE_S)


async def test_an_exchange_that_was_overtaken_causes_no_other():
    service, news = HoldingService(), asyncio.Event()
    agent = asyncio.create_task(exchange_for_ever(service.exchange, news))
    await service.rest()
    assert service.count == 1
    news.set()
    await service.rest()
    assert service.count == 2
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)


async def test_an_answer_causes_the_next_exchange():
    service, news = HoldingService(), asyncio.Event()
    agent = asyncio.create_task(exchange_for_ever(service.exchange, news))
    await service.rest()
    service.held[-1].set()
    await service.rest()
    assert service.count == 2
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)


async def test_news_during_two_exchanges_goes_with_the_next():
    release, started = asyncio.Event(), []

    async def exchange():
        started.append(1)
        await release.wait()

    news = asyncio.Event()
    agent = asyncio.create_task(exchange_for_ever(exchange, news))
    await asyncio.sleep(2 * PAUSE_S)
    news.set()
    while len(started) < 2:
        await asyncio.sleep(PAUSE_S)
    news.set()
    await asyncio.sleep(5 * PAUSE_S)
    assert len(started) == 2, "no more than two are under way"
    release.set()
    while len(started) < 3:
        await asyncio.sleep(PAUSE_S)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
