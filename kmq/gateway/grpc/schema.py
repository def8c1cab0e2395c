"""Messages and methods of podbus.v1.PodBus, from podbus.desc, which is podbus.proto compiled.

No generated Python is used, because it works only with a protobuf at least as new as the protoc that made it.
"""

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def _load() -> Any:
    """Return the descriptor of podbus.proto."""
    compiled = descriptor_pb2.FileDescriptorSet.FromString((files("kmq.gateway") / "podbus.desc").read_bytes())
    pool = descriptor_pool.Default()  # where reflection looks
    pool.AddSerializedFile(compiled.file[0].SerializeToString())
    return pool.FindFileByName(compiled.file[0].name)


_FILE = _load()
MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(message) for name, message in _FILE.message_types_by_name.items()
}
METHODS: dict[str, Any] = dict(_FILE.services_by_name["PodBus"].methods_by_name)
SERVICE: str = _FILE.services_by_name["PodBus"].full_name
ProduceResponse, ConsumeResponse = MESSAGES["ProduceResponse"], MESSAGES["ConsumeResponse"]


def request_of(method: str) -> Any:
    """Return the class of the requests of a method."""
    return message_factory.GetMessageClass(METHODS[method].input_type)


def response_of(method: str) -> Any:
    """Return the class of the responses of a method."""
    return message_factory.GetMessageClass(METHODS[method].output_type)
