"""Ingress: receives lines from clients and hands them to the framer. From its loop down to the bytes of a connection.

loop.py         the event loop: what it waits for, what it does once a second, and how it ends
ports.py        the listeners; connections of the ack port; producers accepted, or turned away
producers.py    connections of producers: read in turn, greeted, answered, ended; from bytes to whole lines
hello.py        what the first line of a connection, and of a unit, may say
limits.py       whether messages are accepted now; which connections are late, or take too much memory
connection.py   one connection: its phase, its unfinished line, its replies, its end; all connections by their names
"""
