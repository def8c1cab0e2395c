"""A plugin of pytest: `test.service` of kafka-python's own tests, which its package lacks. The broker is there already."""

import sys
import types


class ExternalService:
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def open(self) -> None:
        pass

    def stop(self) -> None:
        pass


module = types.ModuleType("test.service")
vars(module).update(ExternalService=ExternalService, SpawnedService=None)
sys.modules[module.__name__] = module
