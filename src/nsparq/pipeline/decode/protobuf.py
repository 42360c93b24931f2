"""Protobuf: one Protobuf message in each message. Needs no Spark.

Values follow the Protobuf rules. A field that was not sent is null if the message shows that
(`optional`, `oneof`, a message, proto2), and its default otherwise. Unknown fields are ignored,
because newer programs may send them; so bytes of another message type may decode too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nsparq.pipeline.decode.formats import Decoder, SchemaFileError, Undecodable, library, without_frame
from nsparq.pipeline.decode.samples import quoted

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message

Convert = Callable[[Any], Any]

# Field types, as numbered in google.protobuf.descriptor_pb2.FieldDescriptorProto.
_STRING, _GROUP, _MESSAGE, _BYTES, _ENUM = 9, 10, 11, 12, 14
_COLUMNS: Final = {
    1: "DOUBLE",
    2: "FLOAT",
    3: "BIGINT",  # int64
    4: "DECIMAL(20, 0)",  # uint64, of which BIGINT holds only half
    5: "INT",
    6: "DECIMAL(20, 0)",  # fixed64
    7: "BIGINT",  # fixed32
    8: "BOOLEAN",
    _STRING: "STRING",
    _BYTES: "BINARY",
    13: "BIGINT",  # uint32
    _ENUM: "STRING",
    15: "INT",  # sfixed32
    16: "BIGINT",  # sfixed64
    17: "INT",  # sint32
    18: "BIGINT",  # sint64
}
_WELL_KNOWN: Final = "google.protobuf."
_WRAPPED: Final = {
    f"{_WELL_KNOWN}{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_FREE: Final = {f"{_WELL_KNOWN}{name}" for name in ("Struct", "Value", "ListValue")}
"""Types that hold any JSON value."""
_TIMES: Final = range(-62_135_596_800, 253_402_300_800)
"""The years 1 to 9999, in seconds: the range of a Timestamp."""
_DURATIONS: Final = range(-315_576_000_000, 315_576_000_001)
_NANOS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Protobuf:
    """A message type, and the framing of the bodies (see `formats.without_frame`)."""

    descriptors: bytes
    """A FileDescriptorSet from `protoc --include_imports --descriptor_set_out`."""
    message: str
    """With its package, such as `shop.Order`."""
    framing: str = ""

    def columns(self) -> str:
        return ", ".join(_columns(self._descriptor(), " ", ()))

    def decoder(self) -> Decoder:
        descriptor, framing = self._descriptor(), self.framing
        # This refuses a type that contains itself, which `_row` would follow endlessly.
        self.columns()
        kind = _library("message_factory").GetMessageClass(descriptor)
        failed = _library("message").DecodeError
        convert = _row(descriptor)

        def decode(body: bytes) -> dict[str, Any]:
            content = without_frame(body, framing)
            if framing:
                content = _without_path(content, descriptor)
            try:
                found = kind.FromString(content)
            except failed as error:
                fault = _fault(memoryview(content), descriptor, "")
                raise Undecodable(fault or str(error)) from error
            if not found.IsInitialized():
                raise Undecodable(f"{', '.join(found.FindInitializationErrors())} is missing")
            return convert(found)

        return decode

    def _descriptor(self) -> Descriptor:
        """Raises SchemaFileError."""
        pool = _library("descriptor_pool").DescriptorPool()
        parser = _library("descriptor_pb2").FileDescriptorSet
        try:
            files = parser.FromString(self.descriptors).file
            for file in files:
                pool.Add(file)
        # Each build of the library raises other errors for such a file.
        except Exception as error:
            text = "is not a complete descriptor set (protoc --include_imports --descriptor_set_out)"
            raise SchemaFileError(f"{text}: {error}") from error
        try:
            found: Descriptor = pool.FindMessageTypeByName(self.message)
        except KeyError as error:
            known = (f"{file.package}.{one.name}".lstrip(".") for file in files for one in file.message_type)
            shown = ", ".join(name for name in known if not name.startswith(_WELL_KNOWN))
            text = f"has no message {self.message!r}; there are {shown or 'none'}"
            raise SchemaFileError(text) from error
        return found


def _library(module: str) -> Any:
    return library(f"google.protobuf.{module}", "Protobuf", "protobuf")


# columns


def _columns(descriptor: Descriptor, separator: str, within: tuple[str, ...]) -> list[str]:
    name = descriptor.full_name
    if name in within:
        raise SchemaFileError(f"{name} contains itself, which no column can do")
    if not descriptor.fields and not within:
        raise SchemaFileError(f"{name} has no fields")
    return [f"{quoted(one.name)}{separator}{_column(one, (*within, name))}" for one in descriptor.fields]


def _column(field: FieldDescriptor, within: tuple[str, ...]) -> str:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return f"MAP<{_one(entry['key'], within)}, {_one(entry['value'], within)}>"
    return f"ARRAY<{_one(field, within)}>" if field.is_repeated else _one(field, within)


def _one(field: FieldDescriptor, within: tuple[str, ...]) -> str:
    """The type of one value, even if the field is repeated."""
    if field.type not in (_MESSAGE, _GROUP):
        return _COLUMNS[field.type]
    name = field.message_type.full_name
    if name == f"{_WELL_KNOWN}Timestamp":
        return "TIMESTAMP"
    if name == f"{_WELL_KNOWN}Duration":
        return "INTERVAL DAY TO SECOND"
    if name in _WRAPPED:
        return _COLUMNS[field.message_type.fields_by_name["value"].type]
    if _is_text(field.message_type):
        return "STRING"
    return f"STRUCT<{', '.join(_columns(field.message_type, ': ', within))}>"


def _is_map(field: FieldDescriptor) -> bool:
    return field.type == _MESSAGE and bool(field.message_type.GetOptions().map_entry)


def _is_text(descriptor: Descriptor) -> bool:
    """Whether a message has no columns of its own. Its column is the JSON text of the message."""
    return descriptor.full_name in _FREE or not descriptor.fields


# values


def _row(descriptor: Descriptor) -> Callable[[Message], dict[str, Any]]:
    fields = [(one.name, one.has_presence, _converter(one)) for one in descriptor.fields]

    def convert(message: Message) -> dict[str, Any]:
        return {
            name: None if has_presence and not message.HasField(name) else to_value(getattr(message, name))
            for name, has_presence, to_value in fields
        }

    return convert


def _converter(field: FieldDescriptor) -> Convert:
    if _is_map(field):
        key, value = (_value(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        return lambda found: [(key(one), value(found[one])) for one in found]
    one = _value(field)
    return (lambda found: [one(each) for each in found]) if field.is_repeated else one


def _value(field: FieldDescriptor) -> Convert:
    if field.type == _ENUM:
        names = {number: one.name for number, one in field.enum_type.values_by_number.items()}
        # A newer program may send a value that is unknown here.
        return lambda number: names.get(number, str(number))
    if field.type not in (_MESSAGE, _GROUP):
        return lambda found: found
    name = field.message_type.full_name
    if name == f"{_WELL_KNOWN}Timestamp":
        return lambda found: _micros(found, field.name, _TIMES)
    if name == f"{_WELL_KNOWN}Duration":
        return lambda found: _micros(found, field.name, _DURATIONS)
    if name in _WRAPPED:
        return lambda found: found.value
    if _is_text(field.message_type):
        to_json = _library("json_format").MessageToJson
        return lambda found: to_json(found, indent=None)
    return _row(field.message_type)


def _micros(found: Any, name: str, allowed: range) -> int:
    if found.seconds not in allowed or not -_NANOS < found.nanos < _NANOS:
        raise Undecodable(f"{name}: {found.seconds} s and {found.nanos} ns is out of range")
    return int(found.seconds * 1_000_000 + found.nanos // 1000)


# framing


def _without_path(content: bytes, wanted: Descriptor) -> bytes:
    """Removes the message index that Confluent's serializer writes after the schema id: a count,
    and as many numbers. A single 0 is the first message type of the schema. Raises Undecodable."""
    view = memoryview(content)
    try:
        count, at = _varint(view, 0)
        path = []
        for _ in range(_signed(count)):
            number, at = _varint(view, at)
            path.append(_signed(number))
    except _Short as error:
        raise Undecodable("the message ends within its Confluent frame") from error
    expected = _path(wanted)
    if (path or [0]) != expected:
        raise Undecodable(f"is type {path or [0]} of its schema, but {wanted.full_name} is type {expected}")
    return content[at:]


def _signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def _path(descriptor: Descriptor) -> list[int]:
    outer = descriptor.containing_type
    if outer is None:
        return [list(descriptor.file.message_types_by_name).index(descriptor.name)]
    return [*_path(outer), list(outer.nested_types_by_name).index(descriptor.name)]


# why bytes do not decode


class _Short(Exception):
    """The bytes end within a value."""


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A number, and the position after it. Raises _Short."""
    value = shift = 0
    while at < len(view) and shift < 70:
        value |= (view[at] & 0x7F) << shift
        at += 1
        if not view[at - 1] & 0x80:
            return value, at
        shift += 7
    raise _Short


def _fault(view: memoryview, descriptor: Descriptor, path: str) -> str:
    """The first error, which the library does not name. Empty if it is not found: groups, a
    deprecated feature, are not examined."""
    at = 0
    while at < len(view):
        begin, name = at, path or "a field"
        try:
            tag, at = _varint(view, at)
            number, wire = tag >> 3, tag & 7
            if not number or wire in (4, 6, 7):
                return f"{path or 'the message'}: no field begins at byte {begin}"
            if wire == 3:
                return ""
            field = descriptor.fields_by_number.get(number)
            name = ".".join(filter(None, [path, field.name if field else f"field {number}"]))
            content, at = _skip(view, at, wire)
        except _Short:
            return f"{name}: the message ends within its value"
        found = _fault_within(content, field, name) if field is not None and wire == 2 else ""
        if found:
            return found
    return ""


def _skip(view: memoryview, at: int, wire: int) -> tuple[memoryview, int]:
    """The bytes of a value, and the position after it. Raises _Short."""
    if wire == 0:
        _, end = _varint(view, at)
        return view[at:end], end
    size = {1: 8, 5: 4}.get(wire, 0)
    if wire == 2:
        size, at = _varint(view, at)
    if at + size > len(view):
        raise _Short
    return view[at : at + size], at + size


def _fault_within(content: memoryview, field: FieldDescriptor, name: str) -> str:
    if field.type == _MESSAGE:
        return _fault(content, field.message_type, name)
    if field.type == _STRING:
        try:
            bytes(content).decode()
        except UnicodeDecodeError as error:
            return f"{name}: {error}"
    return ""
