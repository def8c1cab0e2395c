"""Messages and methods of the services, from podbus.desc and kmq.desc, which are podbus.proto and kmq.proto compiled.

No generated Python is used, because it works only with a protobuf at least as new as the protoc that made it. Refusals
are gRPC statuses with `<code>: <text>` as the message. The trailing metadata has the code as `kmq-code`, and the
numbers and the field of the refusal under their names.
"""

from importlib.resources import files
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kmq.gateway.core.broker import RequestRefused
from kmq.wire import refusals


class Schema:
    """One service. `messages` and `methods` by name; `service`: its full name."""

    def __init__(self, file: str, service: str) -> None:
        compiled = descriptor_pb2.FileDescriptorSet.FromString((files("kmq.gateway") / file).read_bytes())
        pool = descriptor_pool.Default()  # where reflection looks
        pool.AddSerializedFile(compiled.file[0].SerializeToString())
        found = pool.FindFileByName(compiled.file[0].name)
        self.messages: dict[str, Any] = {
            name: message_factory.GetMessageClass(message) for name, message in found.message_types_by_name.items()
        }
        self.methods: dict[str, Any] = dict(found.services_by_name[service].methods_by_name)
        self.service: str = found.services_by_name[service].full_name

    def request_of(self, method: str) -> Any:
        """Return the class of the requests of a method."""
        return message_factory.GetMessageClass(self.methods[method].input_type)

    def response_of(self, method: str) -> Any:
        """Return the class of the responses of a method."""
        return message_factory.GetMessageClass(self.methods[method].output_type)


PODBUS = Schema("podbus.desc", "PodBus")
KMQ = Schema("kmq.desc", "Kmq")


# --- refusals --------------------------------------------------------------------------------------------------------

_MOST_TEXT = 2000  # bytes, which may be sent as three times as many: clients break a connection with more than 8 KiB
_SHOWN = ("field", "seq", "first", "end")


def status_of(code: str) -> grpc.StatusCode:
    """Return the gRPC status that belongs to the code of a refusal."""
    return grpc.StatusCode[refusals.find(code).grpc]


def trailers_of(refused: RequestRefused) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a refusal."""
    shown = ((f"kmq-{name}", str(refused.fields[name])) for name in _SHOWN if name in refused.fields)
    return ("kmq-code", refused.code), *shown


async def refuse(context: Any, refused: RequestRefused) -> NoReturn:
    """End a call with the status of its refusal."""
    text = f"{refused.code}: {refused}".encode(errors="replace")[:_MOST_TEXT].decode(errors="ignore")
    await context.abort(status_of(refused.code), text, trailers_of(refused))
    raise AssertionError("abort raises")
