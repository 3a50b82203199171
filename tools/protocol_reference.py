"""Write docs/protocol.md from the comments of the protos.

    python tools/protocol_reference.py           # write
    python tools/protocol_reference.py --check   # exit 1 when the page is not current

What is said about a message or a field is said once, beside it in ``protos/``.
"""

from __future__ import annotations

import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from generated import keep_current
from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
TARGET = ROOT / "docs" / "protocol.md"
Field = pb.FieldDescriptorProto
Where = tuple[int, ...]  # a path into a file's descriptor, as SourceCodeInfo has it (descriptor.proto)
MESSAGE, ENUM, SERVICE = 4, 5, 6  # fields of FileDescriptorProto
SYNTAX, PACKAGE = 12, 2
HEAD = """\
# Protocol reference

Generated from the comments in `protos/` by `tools/protocol_reference.py`; how the parts play together is
told in [architecture](architecture.md), [router](router.md) and [KV daemon](kvd.md). Every server also
offers `grpc.health.v1.Health` and reflection (`grpcurl -plaintext HOST:PORT list`). Who may call what
with TLS: [security](security.md). What statuses mean: [errors](errors.md).
"""


class Comments:
    """The comments of one file, by the place they belong to."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._at: dict[Where, pb.SourceCodeInfo.Location] = {
            tuple(location.path): location for location in file.source_code_info.location
        }

    def of(self, *where: int) -> str:
        """Return what is said about a thing, before it or at the end of its line, as one paragraph."""
        location = self._at.get(where)
        if location is None:
            return ""
        before, after = _joined(location.leading_comments), _joined(location.trailing_comments)
        return f"{before} {after[:1].upper()}{after[1:]}" if before and after else before + after

    def paragraphs(self, *where: int) -> list[str]:
        """Return a leading comment's paragraphs, those that stand apart before it included."""
        location = self._at.get(where)
        if location is None:
            return []
        parts = [*location.leading_detached_comments, location.leading_comments]
        return [_joined(part) for text in parts for part in text.split("\n\n") if part.strip()]


def read_protos() -> list[pb.FileDescriptorProto]:
    """Compile all protos and return them with their comments, in the order of their names."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "all.bin"
        sources = sorted(str(path) for path in (PROTOS / "splitwise" / "v1").glob("*.proto"))
        include = str(files("grpc_tools") / "_proto")
        words = ["protoc", f"-I{PROTOS}", f"-I{include}", "--include_source_info"]
        if protoc.main([*words, f"--descriptor_set_out={target}", *sources]) != 0:
            raise SystemExit("protoc failed: see its message above")
        return list(pb.FileDescriptorSet.FromString(target.read_bytes()).file)


def render() -> str:
    """Return the page."""
    protos = read_protos()
    contents = [f"- [{_title(file)}](#{_anchor(_title(file))})" for file in protos]
    parts = [HEAD, "\n".join(contents), *("\n".join(_file(file)) for file in protos)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _title(file: pb.FileDescriptorProto) -> str:
    return file.name.removeprefix("splitwise/v1/")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _file(file: pb.FileDescriptorProto) -> Iterator[str]:
    comments = Comments(file)
    yield f"## {_title(file)}"
    for paragraph in [*comments.paragraphs(SYNTAX), *comments.paragraphs(PACKAGE)]:
        yield f"\n{paragraph}"
    for number, service in enumerate(file.service):
        yield from _service(service, comments, (SERVICE, number))
    for number, message in enumerate(file.message_type):
        yield from _message(message, comments, (MESSAGE, number), "")
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, comments, (ENUM, number))


def _service(service: pb.ServiceDescriptorProto, comments: Comments, where: Where) -> Iterator[str]:
    yield f"\n### Service {service.name}"
    yield from (f"\n{paragraph}" for paragraph in comments.paragraphs(*where))
    yield "\n| method | request | response | |\n|---|---|---|---|"
    for number, method in enumerate(service.method):
        asked = ("stream of " if method.client_streaming else "") + _short(method.input_type)
        answered = ("stream of " if method.server_streaming else "") + _short(method.output_type)
        yield f"| `{method.name}` | {asked} | {answered} | {_cell(comments.of(*where, 2, number))} |"


def _message(message: pb.DescriptorProto, comments: Comments, where: Where, outer: str) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield f"\n### {outer}{message.name}"
    yield from (f"\n{paragraph}" for paragraph in comments.paragraphs(*where))
    maps = {
        f".splitwise.v1.{outer}{message.name}.{entry.name}": entry
        for entry in message.nested_type
        if entry.options.map_entry
    }
    if message.field:
        yield "\n| number | field | type | |\n|---|---|---|---|"
    for number, field in enumerate(message.field):
        kind = _type(field, maps)
        if field.HasField("oneof_index") and not field.proto3_optional:
            kind += f" (one of `{message.oneof_decl[field.oneof_index].name}`)"
        about = _cell(comments.of(*where, 2, number))
        yield f"| {field.number} | `{field.name}` | {kind} | {about} |"
    for number, inner in enumerate(message.nested_type):
        yield from _message(inner, comments, (*where, 3, number), f"{outer}{message.name}.")


def _enum(enum: pb.EnumDescriptorProto, comments: Comments, where: Where) -> Iterator[str]:
    yield f"\n### {enum.name}"
    yield from (f"\n{paragraph}" for paragraph in comments.paragraphs(*where))
    yield "\n| number | value | |\n|---|---|---|"
    for number, value in enumerate(enum.value):
        yield f"| {value.number} | `{value.name}` | {_cell(comments.of(*where, 2, number))} |"


def _type(field: Field, maps: dict[str, pb.DescriptorProto]) -> str:
    if field.type_name in maps:
        key, value = maps[field.type_name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    name = _short(field.type_name) if field.type_name else Field.Type.Name(field.type)[5:].lower()
    if field.label == Field.LABEL_REPEATED:
        return f"list of {name}"
    return f"{name}, optional" if field.proto3_optional else name


def _short(name: str) -> str:
    """Link a message or enum of ours to its heading."""
    plain = name.removeprefix(".splitwise.v1.")
    return f"[{plain}](#{_anchor(plain)})"


def _joined(text: str) -> str:
    return " ".join(text.replace("----", "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Command line entry; returns the exit status."""
    return keep_current(TARGET, render(), "protocol_reference")


if __name__ == "__main__":
    raise SystemExit(main())
