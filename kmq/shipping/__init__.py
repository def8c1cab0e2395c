"""`kmq ship` sends log files as messages: the followed files, the state file, and the process that sends."""
