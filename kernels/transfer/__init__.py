"""Results to the host and to other ranks, time stamps and memory probes."""
