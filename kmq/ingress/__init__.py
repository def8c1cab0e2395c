"""What the stage ingress is made of, from its loop down to the bytes of one connection.

loop.py         the event loop: what it waits for, and what it does once a second
drain.py        the end of the loop
gate.py         whether messages are accepted now
ports.py        the listeners
askers.py       connections of the ack port
entrance.py     producers accepted, or turned away
producers.py    connections of producers: read in turn, answered, ended
greeter.py      what a hello gives a connection; hello.py: what it may say
deadlines.py    which connections are late
farewell.py     how a connection ends
table.py        open connections by their names
connection.py   one connection: its phase, its unfinished line; replies.py: what it is owed
intake.py       from bytes to whole lines
budgets.py      what all connections together may keep in memory
"""
