"""``POST /llm``: latency, throughput and memory of a language model on devices."""
