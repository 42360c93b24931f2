from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, ClassVar, Generic, Literal, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.client.payloads.decode import DecodeFailed, payload_decoder


class Currency(Enum):
    EURO = "EUR"
    DOLLAR = "USD"


class Priority(IntEnum):
    LOW = 1
    HIGH = 2


Sku = NewType("Sku", str)


@dataclass(frozen=True)
class Item:
    sku: Sku
    price: float
    count: int = 1


@dataclass
class Order:
    number: int
    items: list[Item]
    currency: Currency
    placed: datetime.datetime
    note: str | None = None
    labels: dict[str, int] = field(default_factory=dict)
    total: float = field(init=False, default=0.0)
    version: ClassVar[int] = 3


@dataclass
class Tree:
    value: int
    children: list[Tree] = field(default_factory=list)


@dataclass
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError("value must be positive")


class Address(TypedDict):
    street: str
    zip: NotRequired[str]


class Model(pydantic.BaseModel):
    name: str
    sizes: list[int] = []


class Struct(msgspec.Struct):
    name: str
    sizes: list[int] = []


@pydantic.dataclasses.dataclass
class CheckedItem:
    price: float


def decode(kind: Any, value: Any) -> Any:
    return payload_decoder(kind)(json.dumps(value).encode())


def refuse(kind: Any, value: Any) -> str:
    with pytest.raises(DecodeFailed) as caught:
        decode(kind, value)
    return str(caught.value)


ORDER = {
    "number": 7,
    "items": [{"sku": "a", "price": 1.5}, {"sku": "b", "price": 2, "count": 3}],
    "currency": "EUR",
    "placed": "2025-03-01T12:30:00Z",
}


# bodies that are not JSON


def test_bytes_are_the_body_itself() -> None:
    assert payload_decoder(bytes)(b"\xff{") == b"\xff{"


def test_text_is_utf_8() -> None:
    assert payload_decoder(str)("Grüße".encode()) == "Grüße"
    with pytest.raises(DecodeFailed, match="not UTF-8: invalid start byte at byte 1"):
        payload_decoder(str)(b"a\xff")


@pytest.mark.parametrize("kind", [Order, Model, Struct], ids=str)
def test_invalid_json_is_an_error_for_every_decoder(kind: Any) -> None:
    for body in (b"", b"{", b"\xff", b"NaN", b"-Infinity", b"1" * 5000):
        with pytest.raises(DecodeFailed):
            payload_decoder(kind)(body)


@pytest.mark.parametrize("kind", [Any, Tree, Model, Struct], ids=str)
def test_json_nested_without_end_is_an_error_too(kind: Any) -> None:
    for opening in (b"[", b'{"children":[', b'{"name":', b'{"sizes":['):
        with pytest.raises(DecodeFailed):
            payload_decoder(kind)(opening * 100_000)


def test_a_tree_that_is_too_deep_is_an_error() -> None:
    # 200 levels are fine; what exceeds the interpreter's stack is a DecodeFailed.
    def tree(depth: int) -> bytes:
        return b'{"value":1,"children":[' * depth + b'{"value":1}' + b"]}" * depth

    assert payload_decoder(Tree)(tree(100)).value == 1
    with pytest.raises(DecodeFailed, match="nested too deeply"):
        payload_decoder(Tree)(tree(5000))


# dataclasses


def test_a_dataclass_with_everything_in_it() -> None:
    order = decode(Order, ORDER | {"note": "fragile", "labels": {"a": 1}})
    placed = datetime.datetime(2025, 3, 1, 12, 30, tzinfo=datetime.UTC)
    items = [Item(Sku("a"), 1.5), Item(Sku("b"), 2.0, 3)]
    assert order == Order(7, items, Currency.EURO, placed, "fragile", {"a": 1})
    assert isinstance(order.items[1].price, float)


def test_unknown_keys_are_ignored_and_defaults_fill_in() -> None:
    order = decode(Order, ORDER | {"coupon": "X", "total": 99, "version": 4})
    assert (order.note, order.labels, order.total, order.version) == (None, {}, 0.0, 3)


def test_defaults_are_not_shared() -> None:
    first, second = decode(Order, ORDER), decode(Order, ORDER)
    assert first.labels is not second.labels


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"number": "7"}, 'number: expected an integer, got "7"'),
        ({"number": True}, "number: expected an integer, got true"),
        ({"number": 7.0}, "number: expected an integer, got 7.0"),
        ({"items": {}}, "items: expected a list, got an object"),
        ({"items": [{"sku": "a", "price": 1}, 5]}, "items[1]: expected an object, got 5"),
        ({"items": [{"sku": "a"}]}, "items[0].price: missing"),
        (
            {"items": [{"sku": "a", "price": 1}] * 2 + [{"sku": "a", "price": "cheap"}]},
            'items[2].price: expected a number, got "cheap"',
        ),
        ({"currency": "GBP"}, 'currency: expected one of "EUR", "USD", got "GBP"'),
        ({"currency": ["EUR"]}, 'currency: expected one of "EUR", "USD", got a list'),
        ({"placed": "yesterday"}, 'placed: expected a time (ISO 8601), got "yesterday"'),
        ({"note": 1}, "note: expected a text, got 1"),
        ({"labels": {"a": 1, "b c": "x"}}, 'labels["b c"]: expected an integer, got "x"'),
        ({"labels": {"a": None}}, "labels.a: expected an integer, got null"),
        ({"number": "x" * 100}, f'number: expected an integer, got "{"x" * 40}…"'),
    ],
)
def test_an_error_has_its_place(change: dict[str, Any], text: str) -> None:
    assert refuse(Order, ORDER | change) == text


def test_a_missing_field_is_reported_with_its_place() -> None:
    assert refuse(Order, {key: value for key, value in ORDER.items() if key != "placed"}) == "placed: missing"


def test_the_error_has_place_and_reason_apart() -> None:
    with pytest.raises(DecodeFailed) as caught:
        decode(Order, ORDER | {"items": [{"sku": "a"}]})
    assert (caught.value.path, caught.value.reason) == ("items[0].price", "missing")


def test_a_dataclass_needs_an_object() -> None:
    assert refuse(Order, [1]) == "expected an object, got a list"
    assert refuse(Order, None) == "expected an object, got null"


def test_a_type_may_contain_itself() -> None:
    tree = decode(Tree, {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]})
    assert tree == Tree(1, [Tree(2, [Tree(3)])])
    assert refuse(Tree, {"value": 1, "children": [{"value": 2, "children": [{}]}]}) == (
        "children[0].children[0].value: missing"
    )


def test_the_checks_of_a_dataclass_count() -> None:
    assert decode(Positive, {"value": 1}) == Positive(1)
    assert refuse(list[Positive], [{"value": 1}, {"value": 0}]) == "[1]: value must be positive"


def test_types_of_the_enclosing_function_are_found_by_name() -> None:
    @dataclass
    class Inner:
        value: int

    @dataclass
    class Outer:
        inner: Inner

    body = b'{"inner": {"value": 1}}'
    assert payload_decoder(Outer, {"Inner": Inner})(body) == Outer(Inner(1))
    with pytest.raises(TypeError, match="annotation of .*Outer cannot be resolved: .*'Inner'"):
        payload_decoder(Outer)


# other types

T = TypeVar("T")


@dataclass
class Page(Generic[T]):
    content: list[T]


@dataclass
class Salted:
    value: int
    salt: InitVar[int]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Any, {"a": [1]}, {"a": [1]}),
        (object, 1, 1),
        (dict, {"a": 1}, {"a": 1}),
        (list, [1, "a"], [1, "a"]),
        (None, None, None),
        (bool, True, True),
        (int, 10**30, 10**30),
        (float, 1, 1.0),
        (list[int], [1, 2], [1, 2]),
        (Sequence[int], [1, 2], [1, 2]),
        (set[str], ["a", "a"], {"a"}),
        (frozenset[str], ["a"], frozenset("a")),
        (tuple, [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (dict[Currency, int], {"EUR": 1}, {Currency.EURO: 1}),
        (dict[datetime.date, int], {"2025-03-01": 1}, {datetime.date(2025, 3, 1): 1}),
        (int | None, None, None),
        (int | str, "a", "a"),
        (float | int, 1, 1),
        (datetime.date | str, "2025-03-01", datetime.date(2025, 3, 1)),
        (datetime.date | str, "someday", "someday"),
        (Item | Tree, {"value": 1}, Tree(1)),
        (list[int] | int, 5, 5),
        (Literal["a", 1], "a", "a"),
        (Literal["a", 1], 1, 1),
        (Priority, 2, Priority.HIGH),
        (Annotated[int, "a note", []], 1, 1),
        (Sku, "a", "a"),
        (Decimal, "1.10", Decimal("1.10")),
        (Decimal, 1.1, Decimal("1.1")),
        (bytes | None, None, None),
        (list[bytes], ["aGk="], [b"hi"]),
        (UUID, "12345678-1234-5678-1234-567812345678", UUID("12345678123456781234567812345678")),
        (datetime.time, "12:30", datetime.time(12, 30)),
        (Address, {"street": "s", "zip": "z", "more": 1}, {"street": "s", "zip": "z"}),
        (Address, {"street": "s"}, {"street": "s"}),
    ],
    ids=str,
)
def test_a_value_that_fits(kind: Any, value: Any, expected: Any) -> None:
    found = decode(kind, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (dict, [], "expected an object, got a list"),
        (None, 0, "expected null, got 0"),
        (bool, 1, "expected true or false, got 1"),
        (float, True, "expected a number, got true"),
        (float, 10**400, "a number that is too large"),
        (int | str, 1.5, "expected int or str, got 1.5"),
        (int | str | None, [], "expected int or str or null, got a list"),
        (int | None, "a", 'expected an integer, got "a"'),
        (Item | int, {"sku": "a"}, "price: missing"),
        (tuple[int, str], [1], "expected 2 items, got 1"),
        (tuple[int, str], [1, 2], "[1]: expected a text, got 2"),
        (tuple[int, str], 5, "expected a list, got 5"),
        (set[Any], [[]], "unhashable type: 'list'"),
        (dict[int, str], {"a": "b"}, 'a: expected a number, got "a"'),
        (Literal["a", 1], True, 'expected one of "a", 1, got true'),
        (Priority, True, "expected one of 1, 2, got true"),
        (Decimal, "x", 'expected a decimal number, got "x"'),
        (list[bytes], ["%"], '[0]: expected bytes in base64, got "%"'),
        (UUID, 5, "expected a UUID, got 5"),
        (Address, {}, "street: missing"),
        (Address, {"street": 1}, "street: expected a text, got 1"),
        (list[list[Item]], [[], [{"sku": 1}]], "[1][0].sku: expected a text, got 1"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit(kind: Any, value: Any, text: str) -> None:
    assert refuse(kind, value) == text


@pytest.mark.parametrize("kind", [complex, type, Page[int], list[complex], Salted, range], ids=str)
def test_a_type_without_a_json_form_is_refused_when_it_is_declared(kind: Any) -> None:
    with pytest.raises(TypeError):
        payload_decoder(kind)


# pydantic and msgspec


@pytest.mark.parametrize("kind", [Model, Struct], ids=str)
def test_models_of_other_packages_decode_the_body(kind: Any) -> None:
    made = decode(kind, {"name": "a", "sizes": [1, 2], "more": 1})
    assert type(made) is kind
    assert (made.name, made.sizes) == ("a", [1, 2])


@pytest.mark.parametrize("kind", [Model, Struct], ids=str)
def test_errors_of_other_packages_have_their_place_too(kind: Any) -> None:
    with pytest.raises(DecodeFailed) as caught:
        decode(kind, {"name": "a", "sizes": [1, "x"]})
    assert caught.value.path == "sizes[1]"
    with pytest.raises(DecodeFailed, match="[Mm]issing|[Ff]ield required"):
        decode(kind, {})


def test_pydantic_says_how_many_errors_there_are() -> None:
    assert refuse(Model, {"sizes": ["x"]}).endswith("(and 1 more)")


def test_pydantic_dataclasses_are_decoded_by_pydantic() -> None:
    assert decode(CheckedItem, {"price": "1.5"}).price == 1.5
    assert refuse(CheckedItem, {"price": "x"}).startswith("price: Input should be a valid number")


@dataclass
class Mixed:
    model: Model
    structs: list[Struct]
    checked: CheckedItem | None = None


def test_models_may_stand_inside_dataclasses_and_lists() -> None:
    mixed = decode(Mixed, {"model": {"name": "m"}, "structs": [{"name": "s"}], "checked": {"price": 1}})
    assert mixed == Mixed(Model(name="m"), [Struct("s")], CheckedItem(1.0))
    assert refuse(Mixed, {"model": {"name": "m"}, "structs": [{"name": "s", "sizes": [0, "x"]}]}) == (
        "structs[0].sizes[1]: Expected `int`, got `str`"
    )
    assert refuse(Mixed, {"model": {"name": 1}, "structs": []}).startswith("model.name: ")


def test_neither_package_is_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pydantic', 'msgspec']))\n"
        "from dataclasses import dataclass\n"
        "from nsparq.client.payloads.decode import payload_decoder\n"
        "@dataclass\n"
        "class A:\n"
        "    x: int\n"
        "assert payload_decoder(A)(b'{\"x\": 1}') == A(1)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# properties


@given(st.binary(max_size=200))
@pytest.mark.parametrize("kind", [Order, Model, Struct], ids=str)
def test_any_bytes_decode_or_raise_decode_failed(kind: Any, body: bytes) -> None:
    try:
        payload_decoder(kind)(body)
    except DecodeFailed:
        pass


KEYS = st.sampled_from(["value", "children", "number", "items", "sku", "price", "labels", "x y"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(KEYS, inside, max_size=4),
    max_leaves=12,
)


@given(JSON)
@pytest.mark.parametrize(
    "kind", [Order, Tree, list[Item], dict[str, list[Tree]] | Item | int, Mixed], ids=str
)
def test_any_json_decodes_or_raises_decode_failed(kind: Any, value: Any) -> None:
    body = json.dumps(value).encode()
    try:
        payload_decoder(kind)(body)
    except DecodeFailed as error:
        assert str(error)


@given(st.recursive(st.builds(Tree, st.integers()), lambda t: st.builds(Tree, st.integers(), st.lists(t))))
def test_what_was_written_from_a_dataclass_is_read_back(tree: Tree) -> None:
    assert decode(Tree, asdict(tree)) == tree
