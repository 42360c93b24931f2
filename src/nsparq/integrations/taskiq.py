"""A broker for taskiq, the task queue for asyncio: tasks travel through an NSQ topic.

    broker = NsqBroker("127.0.0.1:4150", topic="tasks")

    @broker.task
    async def resize(picture: str) -> None: ...

`taskiq worker module:broker` runs the tasks. A task is finished (FIN) after it has run. A task that
no worker has finished is delivered again (REQ, timeout or lost connection).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

from nsparq.client import Config, Consumer, Message, Producer, Reject, Requeue
from nsparq.client.message import check_delay

try:
    from taskiq import (
        AckableMessage,
        AsyncBroker,
        BrokerMessage,
        TaskiqMessage,
        TaskiqMiddleware,
        TaskiqResult,
    )
    from taskiq.exceptions import NoResultError, TaskRejectedError
except ImportError as error:
    raise ImportError("taskiq is missing: pip install 'nsparq[taskiq]'", name=error.name) from error

__all__ = ["NsqBroker", "RequeueMiddleware"]

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 100
"""The default of `taskiq worker --max-async-tasks`."""
CLOSE_S: Final = 2.0
"""Grace for unanswered tasks when the worker ends. taskiq has waited for them before."""


class NsqBroker(AsyncBroker):
    """Publishes tasks to `topic`, and in a worker consumes its `channel`.

    The label `delay` of a task is the number of seconds until it is delivered (DPUB). Delivery is
    at least once: a task may run twice after a lost connection.
    """

    def __init__(
        self,
        *nsqd: str,
        nsqlookupd: Iterable[str] = (),
        topic: str = "taskiq",
        channel: str = "workers",
        max_in_flight: int = MAX_IN_FLIGHT,
        dead_letter: str | None = None,
        config: Config | None = None,
    ) -> None:
        """Addresses of nsqd or nsqlookupd, as for Producer and Consumer. `max_in_flight` is how
        many tasks one worker process holds; no more than its `--max-async-tasks` run at a time.

        `dead_letter` is the topic for tasks that are given up: their bytes cannot be read, no
        worker knows their name, or they were delivered more than `config.max_attempts` times.
        Without it, such tasks are only logged."""
        super().__init__()
        self.add_middlewares(_RequeueUnanswered())
        self.topic, self.channel, self.max_in_flight = topic, channel, max_in_flight
        self.config = config or Config()
        self._nsqd, self._nsqlookupd, self._dead_letter = nsqd, tuple(nsqlookupd), dead_letter
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._received: asyncio.Queue[_Delivery]
        """What taskiq has not taken yet. A worker has it while it listens."""
        self._unfinished: dict[str, _Delivery] = {}
        """By task id."""
        # Raises ValueError for bad names and addresses now, not when a worker starts.
        self._new_consumer()
        self._new_producer()

    def _new_producer(self) -> Producer:
        # A task that is sent twice is better than one that is lost.
        return Producer(*self._nsqd, nsqlookupd=self._nsqlookupd, retry=True, config=self.config)

    def _new_consumer(self) -> Consumer:
        return Consumer(
            self.topic,
            self.channel,
            self._run,
            nsqd=self._nsqd,
            nsqlookupd=self._nsqlookupd,
            concurrency=self.max_in_flight,
            max_in_flight=self.max_in_flight,
            dead_letter=self._dead_letter,
            config=self.config,
        )

    async def startup(self) -> None:
        if self._producer is None:
            self._producer = self._new_producer()
        await super().startup()

    async def shutdown(self) -> None:
        """Close the connections. nsqd delivers unanswered tasks again."""
        try:
            await super().shutdown()
        finally:
            consumer, self._consumer = self._consumer, None
            producer, self._producer = self._producer, None
            if consumer is not None:
                await consumer.stop(CLOSE_S)
            if producer is not None:
                await producer.stop()

    async def kick(self, message: BrokerMessage) -> None:
        """Publish a task. Raises ClientError if nsqd does not acknowledge it, ValueError for an
        invalid `delay`. Tasks get both as SendTaskError."""
        if self._producer is None:
            raise RuntimeError("the broker is not started: await broker.startup() first")
        label = message.labels.get("delay") or 0
        try:
            delay = float(label)
            check_delay(delay)
        except (TypeError, ValueError):
            raise ValueError(f"{message.task_name}: the label delay={label!r} is not in seconds") from None
        await self._producer.publish(self.topic, message.message, defer=delay)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        self._received = asyncio.Queue()
        consumer = self._consumer = self._new_consumer()
        await consumer.start()
        try:
            while True:
                delivery = await self._received.get()
                yield AckableMessage(data=delivery.message.body, ack=delivery.acknowledge)
        finally:
            # The worker stops: running tasks go on, those that wait go to other workers.
            consumer.change_max_in_flight(0)
            while not self._received.empty():
                self._received.get_nowait().end(Requeue(0, backoff=False))

    async def _run(self, message: Message) -> None:
        """Hand a message over to taskiq and wait for the end of its task."""
        try:
            task = self.formatter.loads(message.body)
        except Exception as error:
            raise Reject(f"not a task: {error}") from error
        if self.find_task(task.task_name) is None:
            # Perhaps an older worker, which has yet to be updated. taskiq would drop the task.
            logger.warning("%s: no task %r in this worker, requeued", self.topic, task.task_name)
            raise Requeue(backoff=False)
        if self._consumer is None or self._consumer.max_in_flight == 0:
            raise Requeue(0, backoff=False)
        delivery = _Delivery(message)
        self._unfinished[task.task_id] = delivery
        self._received.put_nowait(delivery)
        try:
            await delivery.ended
        finally:
            if self._unfinished.get(task.task_id) is delivery:
                del self._unfinished[task.task_id]

    def delivery_of(self, task_id: str) -> _Delivery | None:
        """The delivery of a task that runs in this worker and is not acknowledged yet."""
        delivery = self._unfinished.get(task_id)
        return None if delivery is None or delivery.ended.done() else delivery


class _Delivery:
    """A message whose task waits or runs. It ends once: with FIN, or with the exception that its
    consumer gets."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.failure: Requeue | Reject | None = None
        """What acknowledge() does instead of FIN."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def acknowledge(self) -> None:
        self.end(self.failure)

    def end(self, failure: Exception | None) -> None:
        if self.ended.done():
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


class _RequeueUnanswered(TaskiqMiddleware):
    """Requeues a task that taskiq does not acknowledge: a middleware failed, or a task that has to
    acknowledge by itself did not."""

    broker: NsqBroker

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        delivery, running = self.broker.delivery_of(message.task_id), asyncio.current_task()
        if delivery is not None and running is not None:
            running.add_done_callback(lambda _: delivery.end(Requeue(backoff=False)))
        return message


class RequeueMiddleware(TaskiqMiddleware):
    """Requeues failed tasks in NSQ. Use it instead of taskiq's retry middlewares, which publish a
    failed task as a new message.

    Its labels are those of SimpleRetryMiddleware: `retry_on_error` turns it on or off for a task,
    `max_retries` is the number of runs. NSQ counts the runs, so those that ended with a lost worker
    count too. A task that has failed for the last time has its error as result, and goes to the
    broker's dead-letter topic.
    """

    broker: NsqBroker

    def __init__(
        self,
        default_retry_count: int = 3,
        default_retry_label: bool = True,
        delay: float | None = None,
        types_of_exceptions: Iterable[type[BaseException]] = (Exception,),
    ) -> None:
        """`delay` is the seconds between two runs. None: `config.default_requeue_delay`, times the
        number of runs so far."""
        super().__init__()
        self._count, self._by_default = default_retry_count, default_retry_label
        self._delay, self._types = delay, tuple(types_of_exceptions)
        Requeue(delay)  # raises ValueError

    def set_broker(self, broker: AsyncBroker) -> None:
        if not isinstance(broker, NsqBroker):
            raise TypeError(f"RequeueMiddleware needs an NsqBroker, not {type(broker).__name__}")
        super().set_broker(broker)

    def on_error(self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException) -> None:
        delivery = self.broker.delivery_of(message.task_id)
        wanted = str(message.labels.get("retry_on_error", self._by_default)).lower() == "true"
        if delivery is None or not wanted or not isinstance(exception, self._types):
            return
        if isinstance(exception, NoResultError):
            # The task has published itself again, or wants no result. It has not failed.
            return
        runs = int(message.labels.get("max_retries", self._count))
        most = self.broker.config.max_attempts or runs
        if delivery.message.attempts < min(runs, most) and not isinstance(exception, TaskRejectedError):
            delivery.failure = Requeue(self._delay, backoff=False)
            # No result yet: whoever waits for it waits for the last run.
            result.error = NoResultError()
        else:
            delivery.failure = Reject(f"{type(exception).__name__}: {exception}")
