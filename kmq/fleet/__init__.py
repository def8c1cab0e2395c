"""What a broker does with what its fleet says. The process is kmq/cluster/agent.py; docs/fleet.md is for operators.

agent.py       the process: threads, row, signals, what it says of itself in Consul
applying.py    states: the file that the other processes read, and topics; commands: each once, and what came of it
"""
