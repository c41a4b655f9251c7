"""Results to the host, time stamps and memory probes."""
