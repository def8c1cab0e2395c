"""Door: lines out. CONSUME, ASSIGN and GROUP on KMQ_EGRESS_PORT, GET_STATUS on KMQ_STATUS_PORT.

connection.py   one connection: whole lines in, bytes and pieces of files out, deadlines
door.py         what the first line of a connection asks for, tokens, limits
door.py      CONSUME: a topic from somewhere on, as the files have it
service.py      what all connections share
session.py      ASSIGN: fetch, seek, offsets, commit on partitions that the client has named
session.py       GROUP: a session whose partitions a consumer group decides on
service.py       GET_STATUS
"""
