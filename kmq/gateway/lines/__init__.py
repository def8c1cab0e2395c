"""Door: lines out. CONSUME, ASSIGN and GROUP on KMQ_EGRESS_PORT, GET_STATUS on KMQ_STATUS_PORT.

connection.py   one connection: whole lines in, bytes and pieces of files out, deadlines
door.py         what the first line of a connection asks for; CONSUME: a topic from somewhere on, as the files have it
session.py      ASSIGN: partitions that the client has named; GROUP: partitions that a consumer group decides on
service.py      what all connections share; GET_STATUS
"""
