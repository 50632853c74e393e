"""Pilotfish's engine: continuous batching over a paged KV pool. It knows neither Ray nor HTTP."""
