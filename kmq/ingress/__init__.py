"""What the stage ingress is made of, from its loop down to the bytes of one connection.

loop.py         the event loop: what it waits for, and what it does once a second
loop.py        the end of the loop
limits.py         whether messages are accepted now
ports.py        the listeners
ports.py       connections of the ack port
ports.py     producers accepted, or turned away
producers.py    connections of producers: read in turn, answered, ended
producers.py      what a hello gives a connection; hello.py: what it may say
limits.py    which connections are late
connection.py     how a connection ends
connection.py        open connections by their names
connection.py   one connection: its phase, its unfinished line; connection.py: what it is owed
producers.py       from bytes to whole lines
limits.py      what all connections together may keep in memory
"""
