"""`kmq top`: the state of a broker on one screen, four times a second.

snapshot.py      the state at one moment, as one value, from any source
readers.py       read it from the broker of this directory (kmq/broker/overview.py), or from a gateway elsewhere
screen.py        a snapshot and a size → lines; pure
terminal.py      the terminal: keys, size, signals, and its modes before
"""
