"""As much of Kafka's command `kafka-topics.sh` as librdkafka's own tests call, which need it for the settings of a topic."""

import argparse

from kafka import KafkaAdminClient

parser = argparse.ArgumentParser()
for verb in ("create", "alter", "delete"):
    parser.add_argument(f"--{verb}", action="store_true")
for name in ("bootstrap-server", "topic"):
    parser.add_argument(f"--{name}", required=True)
for name in ("partitions", "replication-factor"):
    parser.add_argument(f"--{name}", type=int, default=1)
parser.add_argument("--config", action="append", default=[])
options = parser.parse_args()
admin = KafkaAdminClient(bootstrap_servers=options.bootstrap_server)
if options.create:
    configs = dict(setting.split("=", 1) for setting in options.config)
    counts = {"num_partitions": options.partitions, "replication_factor": options.replication_factor}
    admin.create_topics({options.topic: counts | {"configs": configs}})
elif options.alter:
    admin.create_partitions({options.topic: options.partitions})
else:
    admin.delete_topics([options.topic])
