"""What the stage ingress is made of: from the loop down to one connection.

loop.py         the event loop: what it waits for, and what it does once a second      drain.py   its end
producers.py    the connections of producers                                           askers.py  those of the ack port
ports.py        listeners      gate.py      whether messages are accepted              deadlines.py  who is late
greeter.py      hellos         hello.py     their grammar                              farewell.py   how connections end
table.py        open connections by name    connection.py  one of them, its phase      replies.py    what it is owed
intake.py       bytes → whole lines         budgets.py     what all may keep in memory
"""
