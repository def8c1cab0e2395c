"""How a broker carries out its fleet's messages. The process is kmq/cluster/agent.py; docs/fleet.md is for operators.

agent.py       the process: threads, row, signals, its report in Consul
applying.py    states: the file that the other processes read, and topics; commands: each once, and its result
"""
