"""The four entry points of KMQ, one process each: ingress → framer → durability → router."""
