"""Door: lines out. CONSUME, ASSIGN and GROUP on KMQ_EGRESS_PORT, GET_STATUS on KMQ_STATUS_PORT.

connection.py   one connection: whole lines in, bytes and pieces of files out, deadlines
door.py         what the first line of a connection asks for, tokens, limits
consume.py      CONSUME: a topic from somewhere on, as the files have it
reading.py      the partitions of a session: where each is read next, and batches of them
session.py      ASSIGN: fetch, seek, offsets, commit on partitions that the client has named
status.py       GET_STATUS
"""
