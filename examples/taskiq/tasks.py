"""Tasks for workers: `taskiq worker tasks:broker` runs them, `python tasks.py` sends some."""

import asyncio

from nsparq.integrations.taskiq import NsqBroker, RequeueMiddleware

broker = NsqBroker("127.0.0.1:4150", topic="tasks", dead_letter="tasks.dead")
# A task that fails runs again after 5 seconds, up to 3 times in all.
broker.add_middlewares(RequeueMiddleware(default_retry_count=3, delay=5))


@broker.task
async def welcome(customer: str) -> None:
    print(f"welcome, {customer}")


@broker.task(retry_on_error=False)
def remind(customer: str) -> None:
    # A plain function runs in a thread.
    print(f"come back, {customer}")


async def main() -> None:
    await broker.startup()
    await welcome.kiq("Ada")
    await remind.kicker().with_labels(delay=1).kiq("Ada")
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
