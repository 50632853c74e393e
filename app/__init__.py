"""Pilotfish on Ray Serve: HTTP, routing, replicas. The engine itself is in the package `engine`."""
