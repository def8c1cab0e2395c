"""The Kafka door: clients of Kafka, unchanged, on the same topics, groups and files as every other door."""
