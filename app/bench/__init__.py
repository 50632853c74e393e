"""`llm-bench`: load on any OpenAI-compatible server, with latencies counted from the scheduled send time."""
