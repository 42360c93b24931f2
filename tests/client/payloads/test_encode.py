"""A published value reaches a subscription with the same type as an equal value."""

from __future__ import annotations

import array
import asyncio
import datetime
import subprocess
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.client import Producer, Subscriptions, sync
from nsparq.client.payloads.decode import payload_decoder
from nsparq.client.payloads.encode import encode_bodies, encode_payload
from nsparq.testing import run_broker


class Currency(Enum):
    EURO = "EUR"


class Level(IntEnum):
    LOW = 1


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Item:
    sku: str
    price: Decimal
    raw: bytes = b"\xff"


@dataclass
class Order:
    number: int
    items: list[Item]
    currency: Currency
    placed: datetime.datetime
    id: UUID
    by_day: dict[datetime.date, int] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    pair: tuple[int, str] = (1, "a")
    color: Color = Color.RED
    note: str | None = None


class Model(pydantic.BaseModel):
    name: str = pydantic.Field(alias="fullName")
    at: datetime.datetime


@pydantic.dataclasses.dataclass
class CheckedItem:
    price: float


class Struct(msgspec.Struct):
    name: str
    items: list[Item]


MOMENT = datetime.datetime(2026, 1, 31, 12, 30, tzinfo=datetime.UTC)
ITEM = Item("tea", Decimal("4.50"))
ORDER = Order(
    1, [ITEM], Currency.EURO, MOMENT, UUID(int=7), {MOMENT.date(): 3}, frozenset({"new"}), note="Grüße"
)
MODEL = Model(fullName="ada", at=MOMENT)


@dataclass
class Mixed:
    model: Model
    structs: list[Struct]
    checked: CheckedItem


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bytes, b"\xff{"),
        (str, "Grüße"),
        (dict, {"a": [1, 2.5, None, True], "ü": {"nested": "\ud800"}}),
        (list[int], [1, 2]),
        (dict[int, Level], {5: Level.LOW}),
        (Color, Color.RED),
        (int, 5),
        (datetime.date, MOMENT.date()),
        (Order, ORDER),
        (Model, MODEL),
        (CheckedItem, CheckedItem(1.5)),
        (Struct, Struct("s", [ITEM])),
        (Mixed, Mixed(MODEL, [Struct("s", [ITEM])], CheckedItem(2.0))),
        (list[Model], [MODEL]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_decode_gives_back_what_encode_got(kind: Any, value: Any) -> None:
    assert payload_decoder(kind)(encode_payload(value)) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=12,
)


@given(st.lists(JSON) | st.dictionaries(st.text(), JSON))
def test_any_json_value_comes_back(value: Any) -> None:
    assert payload_decoder(Any)(encode_payload(value)) == value


def test_the_json_is_compact_utf_8_and_other_containers_are_taken_too() -> None:
    assert encode_payload({"ü": (1, 2), "d": deque("a")}) == '{"ü":[1,2],"d":["a"]}'.encode()
    assert encode_payload(OrderedDict(b=1, a=2)) == b'{"b":1,"a":2}'
    assert encode_payload(array.array("B", b"ab")) == encode_payload(bytearray(b"ab")) == b"ab"
    assert encode_bodies(iter(["a", b"b", {}])) == [b"a", b"b", b"{}"]


class Opaque:
    pass


class Wrong(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    what: Opaque


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (Opaque(), TypeError, "a value of type Opaque has no form in JSON"),
        ({"items": [1, {"x y": Opaque()}]}, TypeError, r'items\[1\]\["x y"\]: a value of type Opaque has no'),
        ({"a": {(1, 2): 3}}, TypeError, "a: a key of type tuple has no form in JSON"),
        (Order, TypeError, "cannot be published"),
        (None, TypeError, "None cannot be published: a message is bytes, a text or an object"),
        ({"delay": datetime.timedelta(1)}, TypeError, "delay: a value of type timedelta has no form"),
        (Wrong(what=Opaque()), TypeError, "Opaque"),
        (Struct("s", [Opaque()]), TypeError, "Opaque has no form in JSON"),  # type: ignore[list-item]
        ([Item("a", Decimal(1)), {"x": float("nan")}], ValueError, r"\[1\]\.x: nan is not a JSON number"),
        (ITSELF, ValueError, r"\[0\]: it contains itself"),
        (DEEP, ValueError, "nested too deeply"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_has_no_form_in_json_is_refused_with_its_place(value: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        encode_payload(value)


def test_neither_package_is_imported_for_other_values() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pydantic', 'msgspec']))\n"
        "from dataclasses import dataclass\n"
        "from nsparq.client.payloads.encode import encode_payload\n"
        "@dataclass\n"
        "class A:\n"
        "    x: int\n"
        "assert encode_payload([A(1)]) == b'[{\"x\":1}]'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_way_to_publish_takes_objects() -> None:
    got: list[Order] = []
    with run_broker() as broker:
        broker.create("orders", "ch")
        app = Subscriptions(nsqd=[broker.tcp_address])

        @app.subscribe("orders", "ch")
        async def take(order: Order) -> None:
            got.append(order)

        async def main() -> None:
            async with Producer(broker.tcp_address) as producer, app:
                await producer.publish("orders", ORDER)
                await producer.publish("orders", ORDER, defer=0.001)
                await producer.publish_many("orders", [ORDER, ORDER])
                await broker.wait_empty_async("orders", "ch")

        broker.publish("orders", ORDER)
        with sync.Producer(broker.tcp_address) as producer:
            producer.publish("orders", ORDER)
            producer.publish("orders", ORDER, defer=0.001)
            producer.publish_many("orders", [ORDER, ORDER])
            with pytest.raises(TypeError, match="Opaque has no form in JSON"):
                producer.publish("orders", Opaque())
        asyncio.run(main())
    assert got == [ORDER] * 9
