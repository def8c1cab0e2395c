"""A client made from podbus.proto alone, as a user in another container has it: run as a program, without KMQ.

    python podbus_client.py <directory with podbus_pb2*.py> <host:port>

stdin: one JSON call a line, `{"call": "Produce", "message_id": …, "record": <base64>, …}`; stdout: one JSON answer a line.
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])

import grpc
import podbus_pb2 as messages
import podbus_pb2_grpc as services
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

channel = grpc.insecure_channel(sys.argv[2], options=[("grpc.max_receive_message_length", -1)])
bus = services.PodBusStub(channel)

Fields = dict[str, Any]  # of a call, or of an answer


def produce_request(fields: Fields) -> messages.ProduceRequest:
    return messages.ProduceRequest(message_id=fields["message_id"], record=b64decode(fields["record"]))


def consumed(response: messages.ConsumeResponse) -> Fields:
    return {"record": b64encode(response.record).decode(), "next_offset": response.next_offset}


def produce(call: Fields) -> Fields:
    return {"offset": bus.Produce(produce_request(call), timeout=call.get("timeout")).offset}


def consume(call: Fields) -> Fields:
    return consumed(bus.Consume(messages.ConsumeRequest(offset=call["offset"]), timeout=call.get("timeout")))


def produce_stream(call: Fields) -> Fields:
    offsets = []
    try:
        for response in bus.ProduceStream(map(produce_request, call["requests"])):
            offsets.append(response.offset)
    except grpc.RpcError as error:
        return {"offsets": offsets} | outcome(error)
    return {"offsets": offsets}


def consume_stream(call: Fields) -> Fields:
    """As far as `limit`, or to the end."""
    found = []
    request = messages.ConsumeStreamRequest(offset=call["offset"], follow=call.get("follow", False))
    try:
        for response in (stream := bus.ConsumeStream(request, timeout=call.get("timeout"))):
            found.append(consumed(response))
            if len(found) == call.get("limit"):
                stream.cancel()
                break
    except grpc.RpcError as error:
        return {"records": found} | outcome(error)
    return {"records": found}


def check(call: Fields) -> Fields:
    request = health_pb2.HealthCheckRequest(service=call["service"])
    status = health_pb2_grpc.HealthStub(channel).Check(request).status
    return {"status": health_pb2.HealthCheckResponse.ServingStatus.Name(status)}


def reflect(call: Fields) -> Fields:
    """As grpcurl does: ask which services there are, fetch the schema of one, call a method of it knowing nothing else."""

    def ask(**question: str) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**question)
        return next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request])))

    names = [service.name for service in ask(list_services="").list_services_response.service]
    fetched = ask(file_containing_symbol=call["service"]).file_descriptor_response.file_descriptor_proto
    pool = descriptor_pool.DescriptorPool()
    for file in fetched:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    method = pool.FindServiceByName(call["service"]).methods_by_name[call["method"]]
    request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    invoke = channel.unary_unary(f"/{call['service']}/{call['method']}", request.SerializeToString, response.FromString)
    answer = invoke(request(message_id=call["message_id"], record=b64decode(call["record"])))
    return {"services": sorted(names), "offset": answer.offset}


def outcome(error: grpc.RpcError) -> Fields:
    return {"code": error.code().name, "details": error.details()}


CALLS: dict[str, Callable[[Fields], Fields]] = {
    "Produce": produce,
    "Consume": consume,
    "ProduceStream": produce_stream,
    "ConsumeStream": consume_stream,
    "Check": check,
    "Reflect": reflect,
}

for line in sys.stdin:
    call = json.loads(line)
    try:
        answer = {"code": "OK"} | CALLS[call["call"]](call)
    except grpc.RpcError as error:
        answer = outcome(error)
    assert not any(name.partition(".")[0] in ("kmq", "stages") for name in sys.modules)
    print(json.dumps(answer), flush=True)
