"""The service under load: rates, tail latency, memory, overload, kill -9. Loopback only, bounded in time."""
